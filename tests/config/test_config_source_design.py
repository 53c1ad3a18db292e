"""The YAML of the source design's chapter 4 loads as it stands there, once the model's path is filled in.

The files in tests/golden/config are that chapter's blocks, byte for byte.
"""

from pathlib import Path

import pytest

from quaver.config import RunConfig, dump_yaml, parse_config

GOLDEN = Path(__file__).parents[1] / "golden" / "config"


def block(name: str) -> str:
    text = (GOLDEN / f"{name}.yaml").read_text(encoding="utf-8")
    return text.replace("<hf-deepseek-v3-config-path>", "deepseek_v3")


def combined(precision: str, plan: str = "fsdp_and_plan") -> str:
    return "\n".join([block("model"), block(precision), block(plan)])


def test_the_model_block_loads():
    model = parse_config(block("model")).model
    assert model is not None
    assert model.target == "from_hf_config"
    assert model.config_name_or_path == "deepseek_v3"
    assert len(model.config_overrides) == 22
    assert model.config_overrides["q_lora_rank"] is None
    assert model.config_overrides["kv_lora_rank"] == 3072
    assert model.config_overrides["routed_scaling_factor"] == 2.5
    assert model.config_overrides["use_cache"] is False
    assert (model.torch_dtype, model.attn_implementation, model.force_hf) == ("bfloat16", "sdpa", True)
    assert model.spec is None


@pytest.mark.parametrize(
    ("name", "expected", "recipe"),
    [
        ("low_precision_mxfp8", (True, "mxfp8_e4m3", "mx_block"), "mxfp8_e4m3/mx_block/floor@1"),
        ("low_precision_hif8", (True, "hif8", "current"), "hif8/current@1"),
    ],
)
def test_each_low_precision_block_loads(name, expected, recipe):
    low = parse_config(block(name)).low_precision
    assert (low.enabled, low.format, low.scaling) == expected
    assert low.recipe_id == recipe


def test_the_fsdp_and_plan_block_loads():
    config = parse_config(block("fsdp_and_plan"))
    fsdp = config.fsdp_config
    assert (fsdp.dp_shard_size, fsdp.reshard_after_forward) == (8, True)
    assert (fsdp.comm_fusion, fsdp.fallback_to_unsharded) == (False, False)
    attention, feed_forward, experts = config.plan_overrides
    assert attention.match == tuple(
        f"model.layers.*.self_attn.{name}" for name in ("q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
    )
    assert feed_forward.match == ("model.layers.0.mlp.*_proj", "model.layers.*.mlp.shared_experts.*_proj")
    assert experts.match == ("model.layers.*.mlp.experts",)
    assert [rule.replace_module for rule in config.plan_overrides] == [
        "low_precision_linear",
        "low_precision_linear",
        "deepseek_v3_low_precision_experts",
    ]
    assert [rule.module_type for rule in config.plan_overrides] == [
        "torch.nn.Linear",
        "torch.nn.Linear",
        "transformers.models.deepseek_v3.modeling_deepseek_v3.DeepseekV3Experts",
    ]
    assert all(rule.exact_type and rule.when == "low_precision" for rule in config.plan_overrides)
    assert all(rule.module_class is None for rule in config.plan_overrides)


@pytest.mark.parametrize("precision", ["low_precision_mxfp8", "low_precision_hif8"])
def test_all_blocks_together_load_and_survive_a_dump(precision):
    config = parse_config(combined(precision))
    assert isinstance(config, RunConfig)
    assert config.low_precision.enabled
    assert config.model is not None
    assert len(config.plan_overrides) == 3
    assert parse_config(dump_yaml(config)) == config


def test_the_plan_for_a_model_with_q_lora_rank_loads():
    config = parse_config(
        combined("low_precision_mxfp8", "fsdp_and_plan_q_lora"),
        overrides=["model.config_overrides.q_lora_rank=1536"],
    )
    assert config.model is not None
    assert config.model.config_overrides["q_lora_rank"] == 1536
    assert config.plan_overrides[0].match[:2] == (
        "model.layers.*.self_attn.q_a_proj",
        "model.layers.*.self_attn.q_b_proj",
    )
