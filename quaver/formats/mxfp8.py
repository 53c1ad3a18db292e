"""MXFP8 (OCP Microscaling v1.0): E4M3 elements in blocks of 32 that share a power of two, the E8M0 scale.

value = E4M3(code) * 2^(scale - 127). The scale's exponent follows one of two rules:

- "floor" (OCP): floor(log2 amax) - 8; the largest elements may saturate at 448.
- "rceil": the smallest e with 448 * 2^e >= amax, decided exactly; nothing saturates.

Elements are divided exactly, rounded to nearest even, and saturated at +-448. A zero block has scale byte 0
and codes 00 or 80 by the sign of each zero. A block that holds NaN or Inf has scale byte 255 and codes 0 and
decodes to NaN: nothing non-finite is hidden. A last block may be short.

This file is the room's door to the format; blocks and groups have their own files. May import torch and
these.
"""

from __future__ import annotations

from torch import Tensor

from quaver.formats._common import check_float
from quaver.formats._mx_blocks import (
    BLOCK,
    NAN_SCALE,
    amax_bits,
    blocked,
    dequantize,
    encode_with_scales,
    exponents_from_amax_bits,
    normal_axis,
    quantize_blocked,
    unblocked,
)
from quaver.formats._mx_groups import dequantize_groups, group_scale_ends, quantize_groups

__all__ = [
    "BLOCK",
    "NAN_SCALE",
    "quantize",
    "dequantize",
    "amax_bits",
    "exponents_from_amax_bits",
    "encode_with_scales",
    "quantize_groups",
    "dequantize_groups",
    "group_scale_ends",
]


def quantize(x: Tensor, *, axis: int = -1, scale_rule: str = "floor") -> tuple[Tensor, Tensor]:
    """Quantise to MXFP8 with blocks of 32 along `axis`.

    Args:
        x: float32 or bfloat16, at least 1-d, any strides and device.
        axis: the axis that the GEMM contracts; a length that is no multiple of 32 ends in a short block.
        scale_rule: "floor" or "rceil".

    Returns:
        codes uint8 shaped as `x`, and scales uint8 of the same shape but ceil(n / 32) on `axis`; both
        contiguous.

    Raises:
        TypeError: another dtype. ValueError: 0-d, or another rule. IndexError: no such axis.
    """
    check_float(x, "mxfp8.quantize")
    axis = normal_axis(x, axis)
    codes, scales = quantize_blocked(blocked(x.detach(), axis), axis + 1, scale_rule)
    return unblocked(codes, axis, x.shape[axis]), scales.squeeze(axis + 1).contiguous()
