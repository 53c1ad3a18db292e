"""Recipes, layers and the model's config as the contestants use them: built as a run builds them.

May import: assembly, backends, config, low_precision.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from quaver.backends import Ledger, backend_for
from quaver.bench.sizes import Sizes
from quaver.config import LowPrecisionConfig, RunConfig, load_config
from quaver.low_precision import LowPrecisionLinear, LowPrecisionPolicy, policy_for, quantize_weights

FORMATS: dict[str, dict[str, Any]] = {
    "bf16": {"enabled": False},
    "mxfp8": {"enabled": True, "format": "mxfp8_e4m3", "scaling": "mx_block"},
    "hif8": {"enabled": True, "format": "hif8", "scaling": "current"},
}
LABELS = {"bf16": "BF16", "mxfp8": "MXFP8", "hif8": "HiF8"}

_RULES: list[dict[str, Any]] = [
    {
        "match": [
            *(
                f"model.layers.*.self_attn.{name}"
                for name in ("q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
            ),
            "model.layers.0.mlp.*_proj",
            "model.layers.*.mlp.shared_experts.*_proj",
        ],
        "module_type": "torch.nn.Linear",
        "replace_module": "low_precision_linear",
    },
    {
        "match": "model.layers.*.mlp.experts",
        "module_type": "transformers.models.deepseek_v3.modeling_deepseek_v3.DeepseekV3Experts",
        "replace_module": "deepseek_v3_low_precision_experts",
    },
]


def policy(fmt: str) -> LowPrecisionPolicy:
    """The policy of a format, on the backend that a run would take."""
    config = LowPrecisionConfig(**FORMATS[fmt])
    return policy_for(config, backend_for(config, Ledger(recipe=config.recipe_id)))


def low_precision_linear(fmt: str, weight: torch.Tensor) -> LowPrecisionLinear:
    """A quantised layer with this FP32 weight [N, K]."""
    source = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    with torch.no_grad():
        source.weight.copy_(weight)
    made = LowPrecisionLinear.from_linear(source, fqn="linear", policy=policy(fmt))
    quantize_weights(made)
    return made


def run_config(fmt: str, sizes: Sizes, **sections: Any) -> RunConfig:
    """The run whose step is timed; `sections` are merged into its own."""
    document: dict[str, Any] = {
        "name": f"bench-{fmt}",
        "seed": 1234,
        "model": {"config_name_or_path": "deepseek_v3", "config_overrides": dict(sizes.model)},
        "low_precision": FORMATS[fmt],
        "plan_overrides": _RULES,
        "data": {"seq_len": sizes.seq_len},
        "training": {"micro_batch_size": sizes.batch},
        "optimizer": {"lr": 1e-4, "schedule": {"kind": "constant"}},
    }
    for section, keys in sections.items():
        document[section] = {**document.get(section, {}), **keys}
    return load_config(document)
