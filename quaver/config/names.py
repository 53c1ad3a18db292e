"""Names that a config may use for code, as strings alone.

A config is data: whatever stands behind `_target_`, `replace_module` or `module_type` is looked up here and
is never imported. The objects behind these names are bound in the `assembly` room, which lies above all rooms
that define them. This file imports nothing.
"""

from __future__ import annotations

# format, scaling: the pairs that have a recipe. Everything else fails while the config is parsed.
LEGAL_PAIRS: tuple[tuple[str, str], ...] = (("mxfp8_e4m3", "mx_block"), ("hif8", "current"))
RECIPE_IDS: tuple[str, ...] = ("mxfp8_e4m3/mx_block/floor@1", "mxfp8_e4m3/mx_block/rceil@1", "hif8/current@1")

# canonical name -> other spellings that mean the same
MODEL_TARGETS: dict[str, tuple[str, ...]] = {
    "from_hf_config": (
        "quaver.models.from_hf_config",
        "hyper_models._transformers.HyperAutoModelForCausalLM.from_hf_config",
    ),
}

REPLACEMENTS: dict[str, tuple[str, ...]] = {
    "low_precision_linear": (
        "hyper_models.components.training.low_precision.modules.linear.replace_low_precision_linear",
    ),
    "deepseek_v3_low_precision_experts": (
        "hyper_models.components.models.adapters.deepseek_v3.low_precision"
        ".replace_deepseek_v3_low_precision_experts",
    ),
}

MODULE_TYPES: dict[str, tuple[str, ...]] = {
    "torch.nn.Linear": ("torch.nn.modules.linear.Linear",),
    "transformers.models.deepseek_v3.modeling_deepseek_v3.DeepseekV3Experts": (),
}

SPECS: tuple[str, ...] = ("deepseek_v3_16b",)
DEFAULT_CORPUS = "python-stdlib"


def canonical(table: dict[str, tuple[str, ...]], name: str) -> str | None:
    """The canonical name in `table` that `name` means, or None where the table does not know it."""
    for known, spellings in table.items():
        if name == known or name in spellings:
            return known
    return None


def spellings(table: dict[str, tuple[str, ...]]) -> list[str]:
    """Every accepted name of `table`, canonical ones first."""
    return [*table, *(other for others in table.values() for other in others)]
