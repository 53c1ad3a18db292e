"""HiF8 (HiFloat8, arXiv 2409.16626): eight bits whose mantissa tapers from three bits to none.

| dot bits | D        | exponent               | mantissa bits | positive codes |
|----------|----------|------------------------|---------------|----------------|
| 0000     | denormal | value 2^(M-23), M=1..7 | -             | 01-07          |
| 0001     | 0        | 0                      | 3             | 08-0F          |
| 001      | 1        | +-1                    | 3             | 10-1F          |
| 01       | 2        | +-2..3                 | 3             | 20-3F          |
| 10       | 3        | +-4..7                 | 2             | 40-5F          |
| 11       | 4        | +-8..15                | 1             | 60-7F          |

The exponent is a sign bit (1 = negative), then its magnitude with an implicit leading one. Zero is 0x00
(there is no -0), NaN 0x80, +-Inf 0x6F / 0xEF, the largest finite value 2^15 (0x6E). Rounding is to nearest,
ties away from zero. Non-finite input is never hidden: NaN gives 0x80 and +-Inf 0x6F / 0xEF in every mode.

A tensor (or expert) has one FP32 scale and no axis, so one quantised copy serves every GEMM direction. May
import torch and this room's helpers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quaver.formats._common import check_codes, check_decoded_dtype, check_float, host_amax, lookup, pieces
from quaver.formats._hif8_bits import (
    INFINITY,
    MAX_FINITE,
    NAN,
    ZERO,
    bf16_table,
    bf16_values,
    value_table,
    word_table,
)

__all__ = [
    "SCALE_MAX_INPUT",
    "SCALE_MAX_GRADIENT",
    "ZERO",
    "NAN",
    "INFINITY",
    "MAX_FINITE",
    "encode",
    "decode",
    "decode_table",
    "scale_from_amax",
    "quantize",
]

SCALE_MAX_INPUT = 15.0
"""Format maximum for inputs and weights: 1.875 * 2^3, the largest value with a three-bit mantissa."""

SCALE_MAX_GRADIENT = 224.0
"""Format maximum for gradients: 1.75 * 2^7, the largest value with a two-bit mantissa."""

TABLE_MIN_NUMEL = 1 << 20
"""Elements from which a table of all bfloat16 patterns at one scale repays its building (one CPU thread)."""


def encode(x: Tensor, *, overflow: str = "saturate") -> Tensor:
    """Encode to HiF8, round to nearest, ties away from zero.

    Args:
        x: float32 or bfloat16, any shape, strides and device.
        overflow: what a *finite* |x| >= 40960 becomes: "saturate" +-2^15 (6E / EE), "inf" +-Inf (6F / EF).

    Returns:
        uint8 codes, contiguous, shaped as `x`.

    Raises:
        TypeError: another dtype. ValueError: another overflow mode.
    """
    check_float(x, "hif8.encode")
    if overflow not in ("saturate", "inf"):
        raise ValueError(f'overflow is "saturate" or "inf", not {overflow!r}')
    if x.dtype == torch.bfloat16:
        return lookup(bf16_table(overflow, x.device), x.detach().view(torch.uint16))
    return _encode_words(x.detach(), overflow)


def decode(codes: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Decode HiF8 codes; every value is exact in float32 and in bfloat16.

    Args:
        codes: uint8, any shape, strides and device.
        dtype: torch.float32 or torch.bfloat16.

    Returns:
        values, contiguous, shaped as `codes`.

    Raises:
        TypeError: another dtype on either side.
    """
    check_codes(codes, "hif8.decode")
    return lookup(decode_table(dtype, codes.device), codes)


def decode_table(dtype: torch.dtype = torch.bfloat16, device: torch.device | str = "cpu") -> Tensor:
    """The values of all 256 codes, [256], cached per dtype and device: read it, never write to it.

    Raises:
        TypeError: `dtype` is neither float32 nor bfloat16.
    """
    check_decoded_dtype(dtype, "hif8.decode_table")
    return value_table(dtype, torch.empty(0, device=device).device)  # "cuda" means a device with a number


def scale_from_amax(amax: Tensor, format_max: float) -> Tensor:
    """The FP32 dequantisation scale amax / format_max where that quotient is finite and above 0, else 1.0.

    The quotient is guarded, not amax: an amax of 1e-45 divides to 0.

    Args:
        amax: float32 or bfloat16, the largest magnitude, NaN and Inf included; 0-d, or [E] per expert.
        format_max: SCALE_MAX_INPUT for inputs and weights, SCALE_MAX_GRADIENT for gradients.

    Returns:
        float32, shaped as `amax`, on its device.

    Raises:
        TypeError: another dtype.
    """
    check_float(amax, "hif8.scale_from_amax")
    amax = amax.detach().float()
    # A tensor divisor, because CUDA multiplies by the reciprocal of a Python scalar, which rounds twice.
    quotient = amax / torch.full_like(amax, format_max)
    return torch.where(torch.isfinite(quotient) & (quotient > 0), quotient, torch.ones_like(quotient))


def quantize(x: Tensor, scale: Tensor) -> Tensor:
    """encode(x / scale), the quotient in FP32 rounded to nearest even, finite overflow saturating.

    A large bfloat16 tensor with one scale goes through a table of the codes of all 65,536 bit patterns at
    that scale, built by the arithmetic route and therefore bit-equal to it. FP32 input never goes that way:
    rounding it to bfloat16 first would change codes.

    Args:
        x: float32 or bfloat16, any shape, strides and device.
        scale: float32 dequantisation scale, finite and above 0; one element, or broadcastable to `x`.

    Returns:
        uint8 codes, contiguous, shaped as `x`. Non-finite elements stay non-finite codes.

    Raises:
        TypeError: another dtype. ValueError: `scale` does not broadcast to the shape of `x`.
    """
    check_float(x, "hif8.quantize")
    if not isinstance(scale, Tensor) or scale.dtype != torch.float32:
        raise TypeError("hif8.quantize takes its scale as a float32 tensor")
    # Both operands on one device: CUDA multiplies by the reciprocal of a CPU scalar, which rounds twice.
    x, scale = x.detach(), scale.detach().to(x.device)
    if scale.numel() != 1:
        if torch.broadcast_shapes(x.shape, scale.shape) != x.shape:
            raise ValueError(f"scale of {tuple(scale.shape)} does not broadcast to x of {tuple(x.shape)}")
        return _encode_words(x.float() / scale, "saturate")
    if x.dtype == torch.bfloat16 and x.numel() >= TABLE_MIN_NUMEL:
        return lookup(_encode_words(bf16_values(x.device), "saturate", scale), x.view(torch.uint16))
    return _encode_words(x, "saturate", scale)


def _encode_words(x: Tensor, overflow: str, scale: Tensor | None = None) -> Tensor:
    """Codes of FP32 words (of x / scale, where a one-element scale is given) by their top thirteen bits."""
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    table = word_table(overflow, x.device)
    flat_x, flat_codes = x.contiguous().view(-1), codes.view(-1)
    for part in pieces(x.numel(), 1, x.device):
        words = flat_x[part] if scale is None else flat_x[part].float() / scale.reshape(())
        index = (words.view(torch.int32) >> 19).add_(4096)  # an arithmetic shift: -4096..4095 before the add
        torch.index_select(table, 0, index, out=flat_codes[part])
        # A NaN whose payload lies below the top thirteen bits came out as Inf.
        peak = host_amax(words)
        if peak is None or math.isnan(peak):
            flat_codes[part].masked_fill_(words != words, NAN)
    return codes
