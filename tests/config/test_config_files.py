"""The configs that the project ships: comparable with each other, the 16B model as published."""

from pathlib import Path

import pytest

from quaver.config import RunConfig, load_config, parse_config
from quaver.config.dump import to_data

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
GOLDEN = ROOT / "tests" / "golden" / "config"
RECIPES = {
    "bf16": None,
    "mxfp8": "mxfp8_e4m3/mx_block/floor@1",
    "hif8": "hif8/current@1",
}


def without_name_and_precision(config: RunConfig) -> dict:
    data = to_data(config)
    del data["name"], data["low_precision"]
    return data


@pytest.mark.parametrize("folder", ["tiny", "dsv3-16b"])
def test_three_files_differ_in_name_and_low_precision_alone(folder):
    configs = {name: load_config(CONFIGS / folder / f"{name}.yaml") for name in RECIPES}
    rests = [without_name_and_precision(config) for config in configs.values()]
    assert rests[0] == rests[1] == rests[2]
    assert len({config.name for config in configs.values()}) == 3
    for name, config in configs.items():
        low = config.low_precision
        assert (low.recipe_id if low.enabled else None) == RECIPES[name]


def test_the_formats_of_a_shipped_config_can_be_swapped_by_overrides():
    swapped = load_config(
        CONFIGS / "tiny" / "mxfp8.yaml", ["low_precision.format=hif8", "low_precision.scaling=current"]
    )
    assert swapped.low_precision == load_config(CONFIGS / "tiny" / "hif8.yaml").low_precision


def test_the_tiny_model_is_between_6_and_10_million_parameters():
    config = load_config(CONFIGS / "tiny" / "bf16.yaml")
    assert config.model is not None
    size = config.model.config_overrides
    assert (size["num_hidden_layers"], size["n_routed_experts"], size["num_experts_per_tok"]) == (4, 8, 2)
    hidden, heads, latent = size["hidden_size"], size["num_attention_heads"], size["kv_lora_rank"]
    nope, rope, value = size["qk_nope_head_dim"], size["qk_rope_head_dim"], size["v_head_dim"]
    attention = (
        hidden * heads * (nope + rope)
        + hidden * (latent + rope)
        + latent
        + latent * heads * (nope + value)
        + heads * value * hidden
    )
    expert = 3 * hidden * size["moe_intermediate_size"]
    experts = size["n_routed_experts"] * (expert + hidden) + size["n_shared_experts"] * expert
    dense = 3 * hidden * size["intermediate_size"]
    layers, dense_layers = size["num_hidden_layers"], size["first_k_dense_replace"]
    total = (
        2 * size["vocab_size"] * hidden
        + layers * (attention + 2 * hidden)
        + dense_layers * dense
        + (layers - dense_layers) * experts
        + hidden
    )
    assert total == 6_693_376  # what transformers builds for it


@pytest.mark.parametrize("name", RECIPES)
def test_the_16b_model_is_the_published_one(name):
    ours = load_config(CONFIGS / "dsv3-16b" / f"{name}.yaml")
    text = "\n".join(
        (GOLDEN / f"{part}.yaml").read_text(encoding="utf-8") for part in ("model", "fsdp_and_plan")
    )
    published = parse_config(text)
    assert ours.model is not None
    assert published.model is not None
    assert ours.model.config_overrides == published.model.config_overrides
    assert ours.model.spec == "deepseek_v3_16b"
    assert ours.model.config_name_or_path == "deepseek_v3"
    assert ours.plan_overrides == published.plan_overrides
    assert ours.fsdp_config == published.fsdp_config
    assert ours.data.seq_len == ours.model.config_overrides["max_position_embeddings"] == 4096


def test_the_demo_is_the_tiny_model_in_mxfp8():
    demo = load_config(CONFIGS / "demo.yaml")
    tiny = load_config(CONFIGS / "tiny" / "mxfp8.yaml")
    assert demo.low_precision == tiny.low_precision
    assert demo.plan_overrides == tiny.plan_overrides
