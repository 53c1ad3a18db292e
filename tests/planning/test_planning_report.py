"""`plan` as a Python function: hand-counted models, ranks, verdicts, and that it changes nothing."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from quaver.config import RunConfig, load_config
from quaver.errors import ConfigError, PlanError
from quaver.planning import plan

TINY: dict[str, Any] = {
    "model": {
        "config_name_or_path": "deepseek_v3",
        "config_overrides": {
            "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32,
            "num_hidden_layers": 3, "first_k_dense_replace": 1, "num_attention_heads": 2,
            "num_key_value_heads": 2, "n_routed_experts": 6, "n_shared_experts": 1, "q_lora_rank": None,
            "kv_lora_rank": 40, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16,
            "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
        },
    },
    "low_precision": {"enabled": True},
    "plan_overrides": [
        {
            "match": ["model.layers.*.self_attn.q_proj", "model.layers.0.mlp.*_proj"],
            "module_type": "torch.nn.Linear",
            "replace_module": "low_precision_linear",
        },
        {
            "match": "model.layers.*.mlp.experts",
            "module_type": "transformers.models.deepseek_v3.modeling_deepseek_v3.DeepseekV3Experts",
            "replace_module": "deepseek_v3_low_precision_experts",
        },
    ],
}  # fmt: skip


def config(*overrides: str) -> RunConfig:
    return load_config(copy.deepcopy(TINY), overrides)


def test_parameters_counted_by_hand() -> None:
    report = plan(config())
    attention = 64 * 64 + (40 + 16) * 64 + 2 * 32 * 40 + 64 * 32
    assert report.parameters == {
        "embedding": 300 * 64,
        "lm_head": 300 * 64,
        "mla": 3 * attention,
        "dense_mlp": 3 * 96 * 64,
        "shared_experts": 2 * 3 * 32 * 64,
        "routed_experts": 2 * 6 * 3 * 32 * 64,
        "router": 2 * 6 * 64,
        "norms": 3 * (2 * 64 + 40) + 64,
        "other": 0,
    }
    assert report.total == sum(report.parameters.values())
    assert report.low_precision_parameters == 3 * 64 * 64 + 3 * 96 * 64 + 2 * 6 * 3 * 32 * 64


def test_a_bias_is_no_low_precision_parameter() -> None:
    biased = config(
        "model.config_overrides.attention_bias=true",
        'plan_overrides.0.match=["model.layers.*.self_attn.o_proj"]',
        "plan_overrides.1.match=model.layers.1.mlp.experts",
    )
    assert plan(biased).low_precision_parameters == 3 * 64 * 32 + 6 * 3 * 32 * 64


def test_hits_in_the_order_of_the_rules() -> None:
    assert plan(config()).replacements == [
        {
            "pattern": "model.layers.*.self_attn.q_proj",
            "hits": [f"model.layers.{i}.self_attn.q_proj" for i in range(3)],
        },
        {
            "pattern": "model.layers.0.mlp.*_proj",
            "hits": [f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up", "down")],
        },
        {
            "pattern": "model.layers.*.mlp.experts",
            "hits": ["model.layers.1.mlp.experts", "model.layers.2.mlp.experts"],
        },
    ]


def verdicts(ranks: int, *overrides: str) -> dict[str, tuple[int, str]]:
    report = plan(config(*overrides), ranks)
    return {one.fqn: (one.rows_per_rank, one.verdict) for one in report.verdicts}


def test_verdicts_by_ranks() -> None:
    one = verdicts(1)
    assert set(one.values()) == {(64, "aligned"), (96, "aligned"), (6, "aligned")}
    two = verdicts(2)
    assert two["model.layers.0.self_attn.q_proj.weight"] == (32, "aligned")
    assert two["model.layers.0.mlp.gate_proj.weight"] == (48, "exact")
    assert two["model.layers.0.mlp.down_proj.weight"] == (32, "aligned")
    assert two["model.layers.1.mlp.experts.gate_up_proj"] == (3, "aligned")
    four = verdicts(4)
    assert four["model.layers.1.mlp.experts.down_proj"] == (2, "illegal")  # 6 experts do not divide by 4
    assert four["model.layers.0.mlp.up_proj.weight"] == (24, "exact")
    free = verdicts(4, "fsdp_config.fallback_to_unsharded=true")
    assert free["model.layers.1.mlp.experts.down_proj"] == (2, "replicated")
    strict = verdicts(2, "fsdp_config.strict_scale_tiles=true")
    assert strict["model.layers.0.mlp.gate_proj.weight"] == (48, "illegal")


def test_illegal_shards_are_shown_and_refused_on_demand() -> None:
    report = plan(config(), 4)
    with pytest.raises(
        PlanError, match="4 weights cannot be sharded over 4 ranks: 6 experts do not divide"
    ) as caught:
        report.refuse_illegal()
    assert caught.value.where == "model.layers.1.mlp.experts.gate_up_proj [6, 64, 64]"
    plan(config(), 2).refuse_illegal()


def test_replicas_do_not_change_a_shard() -> None:
    """Eight ranks in groups of two are sharded as two ranks are."""
    hybrid = plan(config("fsdp_config.dp_shard_size=2"), 8)
    assert (hybrid.world_size, hybrid.shard_size) == (8, 2)
    assert hybrid.verdicts == plan(config(), 2).verdicts


def test_ranks_that_do_not_fit() -> None:
    with pytest.raises(ConfigError, match="dp_shard_size 4 does not divide the number of ranks 6"):
        plan(config("fsdp_config.dp_shard_size=4"), 6)
    with pytest.raises(ConfigError, match="0 is no number of ranks"):
        plan(config(), 0)


def test_low_precision_off_has_the_same_parameters_and_no_hits() -> None:
    on, off = plan(config()), plan(config("low_precision.enabled=false"))
    assert off.parameters == on.parameters
    assert (off.recipe, off.low_precision_parameters, off.replacements, off.verdicts) == (None, 0, [], ())


def test_the_document_keeps_places_for_what_comes_later() -> None:
    document = plan(config('model.freeze=["model.layers.*.mlp.gate.weight"]')).to_json()
    assert (document["memory_per_rank"], document["communication"], document["flops"]) == ({}, [], {})
    assert document["frozen"] == [
        {
            "pattern": "model.layers.*.mlp.gate.weight",
            "hits": ["model.layers.1.mlp.gate.weight", "model.layers.2.mlp.gate.weight"],
        }
    ]
    assert document["shards"][0] == {
        "fqn": "model.layers.0.self_attn.q_proj.weight",
        "shape": [64, 64],
        "rows_per_rank": 64,
        "verdict": "aligned",
        "reason": "",
    }
    assert document["structure"]["parameters"] == document["parameters"]["total"]
