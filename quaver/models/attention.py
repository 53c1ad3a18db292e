"""Attention whose value heads are narrower (or wider) than its query and key heads, as in DeepSeek's MLA.

On the CPU torch has a flash kernel only where all heads have one size, and otherwise keeps every score of the
T x T matrix. Two ways lead past that. Plain causal self-attention in BF16, which is what training has, runs in
blocks of large products (causal_blocks.py). Anything else (a mask, grouped heads, FP32, a cache, long sequences)
runs the flash kernel: zeros make the sizes equal and change no number that is read, since a zero column of V
gives a zero column of the output, which is cut off again, and a zero column of Q and K adds nothing to a score.
May import: torch, transformers, causal_blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from quaver.models.causal_blocks import causal_attention, fits

# The name in transformers' registries; "sdpa" in it keeps transformers' check that the model supports SDPA.
UNEQUAL_HEADS = "sdpa_unequal_heads"


def attention_for(config: PreTrainedConfig, wanted: str) -> str:
    """The registered name that `model.attn_implementation` stands for: `sdpa` has another one for unequal heads."""
    if wanted != "sdpa" or not has_unequal_heads(config):
        return wanted
    AttentionInterface.register(UNEQUAL_HEADS, unequal_heads_attention)
    AttentionMaskInterface.register(UNEQUAL_HEADS, sdpa_mask)
    return UNEQUAL_HEADS


def has_unequal_heads(config: PreTrainedConfig) -> bool:
    """True for latent attention (MLA) whose V heads are not as wide as its Q and K heads."""
    found = [getattr(config, f"{part}_head_dim", None) for part in ("qk_nope", "qk_rope", "v")]
    sizes = [size for size in found if isinstance(size, int)]
    return len(sizes) == len(found) and sizes[0] + sizes[1] != sizes[2]


def unequal_heads_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """SDPA attention of heads of two sizes; a drop-in for transformers' own.

    Args:
        module: the attention module.
        query, key: [B, heads, T, D], [B, kv heads, S, D].
        value: [B, kv heads, S, V].
        attention_mask: [B, 1, T, S], bool or additive, or None.
        dropout: of the probabilities; with it there is no fast kernel, and transformers' own runs as it is.
        scaling: of the scores; None: D ** -0.5.
        kwargs: as of transformers' attention functions.

    Returns:
        The output [B, T, heads, V], and None: SDPA gives no weights.
    """
    width, value_width = query.shape[-1], value.shape[-1]
    if query.device.type == "cpu" and not dropout and width != value_width:
        scaling = width**-0.5 if scaling is None else scaling
        if attention_mask is None and _plainly_causal(module, kwargs) and fits(query, key):
            return causal_attention(query, key, value, scaling).transpose(1, 2), None
        query, key, value = (_widened(heads, max(width, value_width)) for heads in (query, key, value))
    output, _ = sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
    )
    return output[..., :value_width], None


def _plainly_causal(module: torch.nn.Module, kwargs: Mapping[str, Any]) -> bool:
    """No key is hidden but the later ones, and nothing is added to the scores."""
    causal = kwargs.get("is_causal")
    if causal is None:
        causal = getattr(module, "is_causal", True)
    return bool(causal) and kwargs.get("position_bias") is None and kwargs.get("softcap") is None


def _widened(heads: torch.Tensor, width: int) -> torch.Tensor:
    missing = width - heads.shape[-1]
    return F.pad(heads, (0, missing)) if missing else heads
