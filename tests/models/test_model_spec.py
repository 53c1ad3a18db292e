"""The frozen 16B specification, on meta: known totals, every deviation named, and the plan that trains it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import TINY
from torch import nn
from transformers import PreTrainedModel
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Experts

from quaver.errors import PlanError
from quaver.models import build_on_meta, check_spec, iter_moe_layers, load_hf_config, parameter_table
from quaver.models.spec import CATEGORIES, DEEPSEEK_V3_16B
from quaver.surgery import BoundRule, build_replacements, compile_plan, install

# The overrides of the published design, as a user would write them.
OVERRIDES: dict[str, Any] = {
    "vocab_size": 102400,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 28,
    "first_k_dense_replace": 1,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "q_lora_rank": None,
    "kv_lora_rank": 3072,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_experts_per_tok": 6,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "max_position_embeddings": 4096,
    "use_cache": False,
}
# Counted by hand from the shapes: 28 layers of MLA, 1 dense MLP, 27 MoE layers.
COUNTS = {
    "embedding": 102400 * 2048,
    "lm_head": 102400 * 2048,
    "mla": 28 * (16 * 128 * 2048 + (3072 + 64) * 2048 + 16 * (64 + 128) * 3072 + 2048 * 16 * 128),
    "dense_mlp": 3 * 10944 * 2048,
    "shared_experts": 27 * 3 * 2 * 1408 * 2048,
    "routed_experts": 27 * 64 * 3 * 1408 * 2048,
    "router": 27 * 64 * 2048,
    "norms": 28 * (2 * 2048 + 3072) + 2048,
    "other": 0,
}


def build(**changes: Any) -> PreTrainedModel:
    return build_on_meta(load_hf_config("deepseek_v3", {**OVERRIDES, **changes}))


def test_the_16b_model_is_the_specification() -> None:
    model = build()
    check_spec(model, "deepseek_v3_16b")
    table = parameter_table(model)
    assert table == COUNTS == DEEPSEEK_V3_16B.counts
    assert tuple(table) == CATEGORIES
    assert sum(table.values()) == 16_585_005_056 == sum(p.numel() for p in model.parameters())


def test_the_variant_with_a_smaller_rank_fails_by_name() -> None:
    model = build(kv_lora_rank=512)
    assert sum(parameter_table(model).values()) == 16_217_931_776
    with pytest.raises(PlanError, match="kv_lora_rank is 512, the specification has 3072"):
        check_spec(model, "deepseek_v3_16b")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(
            ("num_hidden_layers", 27),
            ("first_k_dense_replace", 2),
            ("n_routed_experts", 32),
            ("q_lora_rank", 1536),
        ),
        *(("num_experts_per_tok", 8), ("routed_scaling_factor", 1.0), ("vocab_size", 102464)),
        *(("tie_word_embeddings", True), ("attention_bias", True), ("hidden_act", "gelu")),
    ],
)
def test_a_config_that_differs_is_named(field: str, value: Any) -> None:
    with pytest.raises(PlanError, match=rf"{field} is .*{value}"):
        check_spec(build(**{field: value}), "deepseek_v3_16b")


def _set_experts(model: PreTrainedModel) -> None:
    model.model.layers[5].mlp.experts.num_experts = 63


def _shrink(model: PreTrainedModel) -> None:
    model.model.layers[5].self_attn.kv_b_proj.weight = nn.Parameter(torch.empty(3072, 512, device="meta"))


def _densify(model: PreTrainedModel) -> None:
    model.model.layers[5].mlp = model.model.layers[0].mlp


def _add(model: PreTrainedModel) -> None:
    model.model.layers[5].self_attn.q_proj.bias = nn.Parameter(torch.empty(2048, device="meta"))


def _tie(model: PreTrainedModel) -> None:
    model.lm_head.weight = model.model.embed_tokens.weight


def _drop(model: PreTrainedModel) -> None:
    del model.model.layers[27]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_set_experts, r"layers\.5\.mlp\.experts\.num_experts is 63"),
        (_shrink, r"shape of model\.layers\.5\.self_attn\.kv_b_proj\.weight is \(3072, 512\)"),
        (_densify, "layout of layer 5 is 'dense'"),
        (_add, r"parameters beyond the specification is \['model\.layers\.5\.self_attn\.q_proj\.bias'\]"),
        (_tie, r"shape of lm_head\.weight is None"),
        (_drop, "number of layers is 27"),
    ],
)
def test_a_model_that_differs_behind_an_equal_config_is_named(
    change: Callable[[PreTrainedModel], None], message: str
) -> None:
    model = build()
    change(model)
    with pytest.raises(PlanError, match=message):
        check_spec(model, "deepseek_v3_16b")


def test_another_architecture_and_an_unknown_name() -> None:
    with pytest.raises(PlanError, match="model_type is 'llama'"):
        check_spec(build_on_meta(load_hf_config("llama", {"num_hidden_layers": 1})), "deepseek_v3_16b")
    with pytest.raises(PlanError, match="deepseek_v3_16b"):
        check_spec(nn.Linear(2, 2), "deepseek_v4")


def test_what_no_rule_knows_is_counted_as_other() -> None:
    table = parameter_table(nn.ModuleDict({"adapter": nn.Linear(2, 3)}))
    assert table == {**dict.fromkeys(CATEGORIES, 0), "other": 9}
    with_query_compression = build_on_meta(load_hf_config("deepseek_v3", {**TINY, "q_lora_rank": 32}))
    assert parameter_table(with_query_compression)["other"] == 0


class SwappedLinear(nn.Linear):
    pass


class SwappedExperts(DeepseekV3Experts):
    pass


def swap_to(kind: type[nn.Module]) -> Any:
    def factory(source: nn.Module, fqn: str) -> nn.Module:
        new = kind.__new__(kind)
        new.__dict__ = dict(source.__dict__)
        return new

    return factory


def test_the_plan_of_the_16b_model() -> None:
    """196 dense linears and 27 expert modules, 16,161,832,960 parameters, all on meta."""
    model = build()
    attention = ["q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
    rules = [
        BoundRule(
            tuple(f"model.layers.*.self_attn.{name}" for name in attention),
            *(nn.Linear, True, swap_to(SwappedLinear), "linear"),
        ),
        BoundRule(
            ("model.layers.0.mlp.*_proj", "model.layers.*.mlp.shared_experts.*_proj"),
            *(nn.Linear, True, swap_to(SwappedLinear), "linear"),
        ),
        BoundRule(
            ("model.layers.*.mlp.experts",), DeepseekV3Experts, True, swap_to(SwappedExperts), "experts"
        ),
    ]
    plan = compile_plan(model, rules)
    assert [len(entry.hits) for entry in plan.replacements] == [28, 28, 28, 28, 3, 81, 27]
    names = [target.factory_name for target in plan.targets]
    assert (names.count("linear"), names.count("experts")) == (196, 27)
    targets = [model.get_submodule(target.fqn) for target in plan.targets]
    assert sum(p.numel() for module in targets for p in module.parameters()) == 16_161_832_960
    install(model, build_replacements(model, plan))
    kinds = [type(module) for module in model.modules()]
    assert (kinds.count(SwappedLinear), kinds.count(SwappedExperts)) == (196, 27)
    assert kinds.count(nn.Linear) == 1  # the head
    assert all(p.is_meta for p in model.parameters())
    check_spec(model, "deepseek_v3_16b")


def test_moe_layers_of_the_16b_model() -> None:
    layers = iter_moe_layers(build())
    assert [fqn for fqn, _ in layers] == [f"model.layers.{i}.mlp" for i in range(1, 28)]
    assert all(hasattr(layer, "gate") and hasattr(layer, "experts") for _, layer in layers)
