"""HiF8 (HiFloat8, arXiv 2409.16626): eight bits whose mantissa tapers from three bits to none.

| dot bits | D        | exponent            | mantissa bits | positive codes |
|----------|----------|---------------------|---------------|----------------|
| 0000     | denormal | value 2^(M-23), M=1..7 | -          | 01-07          |
| 0001     | 0        | 0                   | 3             | 08-0F          |
| 001      | 1        | +-1                 | 3             | 10-1F          |
| 01       | 2        | +-2..3              | 3             | 20-3F          |
| 10       | 3        | +-4..7              | 2             | 40-5F          |
| 11       | 4        | +-8..15             | 1             | 60-7F          |

The exponent is a sign bit (1 = negative), then its magnitude with an implicit leading one. Zero is 0x00 (there is
no -0), NaN 0x80, +-Inf 0x6F / 0xEF, the largest finite value 2^15 (0x6E). Rounding is to nearest, ties away from
zero. Non-finite input is never hidden: NaN encodes to 0x80 and +-Inf to 0x6F / 0xEF in every mode.

Rounding ties away looks at one bit below the last mantissa bit and at no other, so a code depends on the top
thirteen bits of an FP32 word alone (sign, exponent, four mantissa bits): one table of 8,192 codes is the encoder.

May import torch and this room's helpers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quaver.formats._common import check_codes, check_decoded_dtype, check_float, looks_clean, lookup, pieces

SCALE_MAX_INPUT = 15.0
"""Format maximum for inputs and weights: 1.875 * 2^3, the largest value that still has a three-bit mantissa."""

SCALE_MAX_GRADIENT = 224.0
"""Format maximum for gradients: 1.75 * 2^7, the largest value that still has a two-bit mantissa."""

ZERO, NAN, INFINITY, MAX_FINITE = 0x00, 0x80, 0x6F, 0x6E
"""Codes of 0, NaN, +Inf and 2^15; the negatives of the last two have bit 0x80 set."""

BF16_TABLE_MIN_NUMEL = 1 << 17
"""Elements from which a 65,536-entry table per tensor scale pays for being built (measured on one CPU thread)."""

# Constant tables, one per (name, dtype, device): 256 to 65,536 entries each.
_TABLES: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}


def encode(x: Tensor, *, overflow: str = "saturate") -> Tensor:
    """Encode to HiF8, round to nearest, ties away from zero.

    Args:
        x: float32 or bfloat16, any shape, strides and device.
        overflow: what a *finite* |x| >= 40960 becomes: "saturate" gives +-2^15 (6E / EE), "inf" gives 6F / EF.

    Returns:
        uint8 codes, contiguous, shaped as `x`.

    Raises:
        TypeError: another dtype. ValueError: another overflow mode.
    """
    check_float(x, "hif8.encode")
    if overflow not in ("saturate", "inf"):
        raise ValueError(f'overflow is "saturate" or "inf", not {overflow!r}')
    x = x.detach()
    if x.dtype == torch.bfloat16:
        return lookup(_bf16_table(overflow, x.device), x.view(torch.uint16))
    return _encode_fp32(x, overflow)


def decode(codes: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Decode HiF8 codes; every value is exact in float32 and in bfloat16.

    Args:
        codes: uint8, any shape.
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
    return _table("decode", dtype, torch.device(device))


def scale_from_amax(amax: Tensor, format_max: float) -> Tensor:
    """The FP32 dequantisation scale amax / format_max where that quotient is finite and above 0, else 1.0.

    The quotient is guarded, not amax: an amax of 1e-45 divides to 0.

    Args:
        amax: float32 or bfloat16, any shape (0-d per tensor, [E] per expert); largest magnitude, NaN and Inf allowed.
        format_max: SCALE_MAX_INPUT or SCALE_MAX_GRADIENT in the recipe.

    Returns:
        float32, shaped as `amax`, on its device.
    """
    check_float(amax, "hif8.scale_from_amax")
    amax = amax.detach().float()
    # A tensor divisor, because CUDA multiplies by the reciprocal of a Python scalar, which rounds twice.
    quotient = amax / torch.full_like(amax, format_max)
    return torch.where(torch.isfinite(quotient) & (quotient > 0), quotient, torch.ones_like(quotient))


def quantize(x: Tensor, scale: Tensor) -> Tensor:
    """encode(x / scale), the quotient in FP32 rounded to nearest even, finite overflow saturating.

    A large bfloat16 tensor with one scale goes through a table of the codes of all 65,536 bit patterns at that
    scale, which is built by the arithmetic route and therefore bit-equal to it. FP32 input never takes that route:
    rounding it to bfloat16 first would change codes.

    Args:
        x: float32 or bfloat16, any shape.
        scale: float32 dequantisation scale, finite and above 0; 0-d, or broadcastable to the shape of `x`.

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
    if scale.numel() == 1:
        if x.dtype == torch.bfloat16 and x.numel() >= BF16_TABLE_MIN_NUMEL:
            patterns = _table("bf16_patterns", torch.float32, x.device)
            return lookup(_encode_fp32(patterns, "saturate", scale), x.view(torch.uint16))
        return _encode_fp32(x, "saturate", scale)
    quotient = x.float() / scale
    if quotient.shape != x.shape:
        raise ValueError(f"scale of shape {tuple(scale.shape)} does not broadcast to x of {tuple(x.shape)}")
    return _encode_fp32(quotient, "saturate")


def _encode_fp32(x: Tensor, overflow: str, scale: Tensor | None = None) -> Tensor:
    """FP32 words (of x / scale where a one-element scale is given) -> codes, by their top thirteen bits."""
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    table = _table(f"encode_{overflow}", torch.uint8, x.device)
    flat_x, flat_codes = x.contiguous().view(-1), codes.view(-1)
    for part in pieces(x.numel(), 1, x.device):
        words = flat_x[part] if scale is None else flat_x[part].float() / scale.reshape(())
        index = (words.view(torch.int32) >> 19).add_(4096)  # arithmetic shift: -4096..4095
        torch.index_select(table, 0, index, out=flat_codes[part])
        # A NaN whose payload lies below the top thirteen bits looks like Inf; without Inf codes there is none.
        if not looks_clean(flat_codes[part].bitwise_and(0x7F) == INFINITY):
            flat_codes[part].masked_fill_(words != words, NAN)
    return codes


def _bf16_table(overflow: str, device: torch.device) -> Tensor:
    """Codes of all bfloat16 bit patterns at scale 1, uint8 [65536]."""
    return _table(f"bf16_{overflow}", torch.uint8, device)


def _table(name: str, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A constant table from the cache, built on first use."""
    key = (name, dtype, device)
    table = _TABLES.get(key)
    if table is None:
        # Outside inference mode, so that a table first used there can still serve autograd later.
        with torch.inference_mode(False), torch.no_grad():
            table = _build_table(name, device).to(dtype)
        if type(table) is Tensor:  # a tracing mode builds fake tensors, which must not outlive it
            _TABLES[key] = table
    return table


def _build_table(name: str, device: torch.device) -> Tensor:
    if name == "decode":
        return torch.tensor([_value(code) for code in range(256)], dtype=torch.float32, device=device)
    if name.startswith("encode_"):
        index = torch.arange(-4096, 4096, dtype=torch.int32, device=device)
        return _encode_bits(index << 19, name.removeprefix("encode_"))
    patterns = torch.arange(65536, dtype=torch.int32, device=device) << 16
    if name == "bf16_patterns":
        return patterns.view(torch.float32)
    return _encode_bits(patterns, name.removeprefix("bf16_"))


def _encode_bits(bits: Tensor, overflow: str) -> Tensor:
    """The encoder in integer arithmetic: int32 FP32 words -> uint8 codes."""
    magnitude = bits & 0x7FFFFFFF
    # Half of the last kept place is added, then the rest cut off: ties go away from zero.
    dropped = 20 + _digits_lost((magnitude >> 23) - 127)
    rounded = ((magnitude + (1 << (dropped - 1))) >> dropped) << dropped
    # The smallest value is 2^-22; [2^-23, 2^-22) rounds to it, ties away, and anything below 2^-23 to zero.
    rounded = torch.where(magnitude < 105 << 23, 105 << 23, rounded)

    exponent, mantissa = (rounded >> 23) - 127, (rounded >> 20) & 7
    size, negative = exponent.abs(), (exponent < 0).to(torch.int32)
    code = torch.where(
        size == 0, 0x08 | mantissa,
        torch.where(
            size == 1, 0x10 | negative << 3 | mantissa,
            torch.where(
                size <= 3, 0x20 | negative << 4 | (size - 2) << 3 | mantissa,
                torch.where(
                    size <= 7, 0x40 | negative << 4 | (size - 4) << 2 | mantissa >> 1,
                    0x60 | negative << 4 | (size - 8) << 1 | mantissa >> 2,
                ),
            ),
        ),
    )  # fmt: skip
    code = torch.where(exponent < -15, exponent + 23, code)
    code = torch.where(magnitude < 104 << 23, ZERO, code)
    # 40960 = 1.25 * 2^15 is halfway from 2^15 to the place that 1.5 * 2^15 would have, which is Inf's.
    code = torch.where(magnitude >= 0x47200000, MAX_FINITE if overflow == "saturate" else INFINITY, code)
    code = torch.where(magnitude == 0x7F800000, INFINITY, code)
    code = torch.where((bits < 0) & (code != ZERO), code | 0x80, code)
    return torch.where(magnitude > 0x7F800000, NAN, code).to(torch.uint8)


def _digits_lost(exponent: Tensor) -> Tensor:
    """How many of the three mantissa bits the exponent takes: 0 up to +-3, 1 to +-7, 2 to +-15, 3 beyond."""
    size = exponent.abs()
    return (size > 3).to(torch.int32) + (size > 7) + (size > 15)


def _value(code: int) -> float:
    """The value of one code, straight from the table in this module's docstring."""
    if code == ZERO:
        return 0.0
    if code == NAN:
        return float("nan")
    sign, low = (-1.0 if code & 0x80 else 1.0), code & 0x7F
    if low == INFINITY:
        return sign * float("inf")
    if low < 0x08:
        return sign * 2.0 ** (low - 23)
    if low < 0x10:
        return sign * (1 + (low & 7) / 8)
    dot = 1 if low < 0x20 else 2 if low < 0x40 else 3 if low < 0x60 else 4
    mantissa_bits = {1: 3, 2: 3, 3: 2, 4: 1}[dot]
    field = (low >> mantissa_bits) & ((1 << dot) - 1)  # sign of the exponent, then its bits below the leading one
    lead = 1 << (dot - 1)
    exponent = (lead | (field & (lead - 1))) * (-1 if field & lead else 1)
    fraction = (low & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    return sign * (1 + fraction) * 2.0**exponent
