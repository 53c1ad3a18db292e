"""Hugging Face models: built on meta, checked against a specification, initialised block by block.

Names are handed out on first use: what needs transformers imports it only then.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "from_hf_config": "build",
    "load_hf_config": "hf_config",
    "build_on_meta": "build",
    "init_units": "init",
    "materialise_unit": "init",
    "materialise": "init",
    "check_spec": "spec",
    "parameter_table": "spec",
    "iter_moe_layers": "moe",
    "RouterBias": "router_bias",
    "RouterLoad": "router_bias",
    "summed_nats": "losses",
    "DeepseekV3LowPrecisionExperts": "deepseek_v3_experts",
    "replace_deepseek_v3_low_precision_experts": "deepseek_v3_experts",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"quaver.models.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'quaver.models' has no attribute {name!r}")
