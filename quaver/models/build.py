"""Builds Hugging Face causal language models from a config: with random weights, or on meta without any.

Random weights are those of transformers, bit for bit. Nothing here knows one architecture from another,
except that a router's bias is kept in FP32. Imports torch, transformers, the config reader and
`quaver.errors`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from quaver.errors import ConfigError
from quaver.models.attention import attention_for
from quaver.models.hf_config import load_hf_config
from quaver.models.moe import ROUTER_BIAS

# The experts of the high-precision model. On the CPU it trains, sums a token's experts in a fixed
# order (the eager loop adds them into a BF16 tensor one by one), and is the fastest of the three: at hidden
# 256, inner 512, 8 experts, top-2 and 2,048 tokens, forward and backward on one core took 68 ms, the eager
# loop 76 ms, and batched_mm, which copies a weight for every token, 9.4 s.
EXPERTS_IMPLEMENTATION = "grouped_mm"
ATTENTION_IMPLEMENTATIONS = ("sdpa", "eager")
TORCH_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def from_hf_config(
    config_name_or_path: str | Path,
    *,
    config_overrides: Mapping[str, Any] | None = None,
    torch_dtype: torch.dtype | str = torch.bfloat16,
    attn_implementation: str = "sdpa",
) -> PreTrainedModel:
    """Build a causal language model on the CPU with random weights, bit for bit as transformers draws them.

    Args:
        config_name_or_path: as in `load_hf_config`.
        config_overrides: as in `load_hf_config`.
        torch_dtype: torch.bfloat16 or torch.float32 (or its name); routers and their bias are FP32 always.
        attn_implementation: `sdpa` or `eager`.

    Returns:
        The model in training mode; `torch.manual_seed` before the call decides its weights.

    Raises:
        ConfigError: as `load_hf_config`, and where transformers cannot build a causal language model from it.
    """
    config = load_hf_config(config_name_or_path, config_overrides)
    return _build(config, torch_dtype, attn_implementation)


def build_on_meta(
    hf_config: PreTrainedConfig,
    torch_dtype: torch.dtype | str = torch.bfloat16,
    attn_implementation: str = "sdpa",
) -> PreTrainedModel:
    """Build the module tree on the meta device: no memory, no random number, no data, no process group.

    `quaver.models.init` gives it values later. The config is copied, not kept.

    Raises:
        ConfigError: as `from_hf_config`.
    """
    with torch.device("meta"):
        return _build(hf_config, torch_dtype, attn_implementation)


def _build(
    hf_config: PreTrainedConfig, torch_dtype: torch.dtype | str, attn_implementation: str
) -> PreTrainedModel:
    """Hand the config to transformers in the current device context, and keep router biases in FP32."""
    dtype = TORCH_DTYPES.get(torch_dtype) if isinstance(torch_dtype, str) else torch_dtype
    if dtype not in TORCH_DTYPES.values():
        raise ConfigError(
            f"torch_dtype {torch_dtype} is not supported",
            where="model.torch_dtype",
            remedy="bfloat16 or float32",
        )
    if attn_implementation not in ATTENTION_IMPLEMENTATIONS:
        raise ConfigError(
            f"attn_implementation {attn_implementation!r} is not supported",
            where="model.attn_implementation",
            remedy=" or ".join(ATTENTION_IMPLEMENTATIONS),
        )
    model_class = _causal_lm_class(hf_config)
    kwargs: dict[str, Any] = {
        "dtype": dtype,
        "attn_implementation": attention_for(hf_config, attn_implementation),
    }
    if model_class._can_set_experts_implementation():
        kwargs["experts_implementation"] = EXPERTS_IMPLEMENTATION
    try:
        model: PreTrainedModel = model_class._from_config(copy.deepcopy(hf_config), **kwargs)
    except (ValueError, TypeError, RuntimeError, ArithmeticError, LookupError, AttributeError) as error:
        reason = (str(error).splitlines() or [""])[0]  # torch may add the frames of its C++ code
        raise ConfigError(
            f"transformers cannot build {model_class.__name__} from this: {type(error).__name__}: {reason}",
            where="model.config_overrides",
            remedy="correct the sizes",
        ) from error
    for module in model.modules():
        bias = module._buffers.get(ROUTER_BIAS)
        if bias is not None and bias.dtype != torch.float32:
            module._buffers[ROUTER_BIAS] = bias.float()
    return model


def _causal_lm_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ConfigError(
            f"transformers has no causal language model for model type {config.model_type!r}",
            where="model.config_name_or_path",
            remedy="choose a decoder-only language model, such as deepseek_v3",
        )
    found: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    chosen: type[PreTrainedModel] = found[0] if isinstance(found, tuple | list) else found
    return chosen
