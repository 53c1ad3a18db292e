"""HiF8 on bit patterns: the encoder in integer arithmetic and the value of each code, and tables of both.

Rounding ties away from zero looks at one bit below the last mantissa bit and at no other, so a code depends
on the top thirteen bits of an FP32 word alone (sign, exponent, four mantissa bits): one table of 8,192 codes
is a whole encoder. The arithmetic here runs once per table. Imports torch alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quaver.formats._common import constant

ZERO, NAN, INFINITY, MAX_FINITE = 0x00, 0x80, 0x6F, 0x6E
"""Codes of 0, NaN, +Inf and 2^15; the negatives of the last two have bit 0x80 set."""

_INF_BITS = 0x7F800000
_OVERFLOW_BITS = (
    0x47200000  # 40960 = 1.25 * 2^15: halfway from 2^15 to where 1.5 * 2^15 would be, Inf's place
)


def word_table(overflow: str, device: torch.device) -> Tensor:
    """Codes by the top thirteen bits of an FP32 word, sign extended, plus 4096: uint8 [8192]."""
    return constant(
        f"hif8_words_{overflow}",
        device,
        lambda: encode_bits(torch.arange(-4096, 4096, dtype=torch.int32) << 19, overflow),
    )


def bf16_table(overflow: str, device: torch.device) -> Tensor:
    """Codes of all bfloat16 bit patterns: uint8 [65536]."""
    return constant(f"hif8_bf16_{overflow}", device, lambda: encode_bits(_bf16_words(), overflow))


def bf16_values(device: torch.device) -> Tensor:
    """The values of all bfloat16 bit patterns: float32 [65536]."""
    return constant("hif8_bf16_values", device, lambda: _bf16_words().view(torch.float32))


def value_table(dtype: torch.dtype, device: torch.device) -> Tensor:
    """The values of all 256 codes, exact in float32 and bfloat16: [256]."""
    return constant(
        f"hif8_values_{dtype}",
        device,
        lambda: torch.tensor([code_value(code) for code in range(256)], dtype=dtype),
    )


def encode_bits(bits: Tensor, overflow: str) -> Tensor:
    """int32 FP32 words -> uint8 codes. `overflow` is "saturate" or "inf"; NaN and Inf keep theirs in both."""
    magnitude = bits & 0x7FFFFFFF
    # The exponent's size eats mantissa bits: 3 are left up to +-3, 2 up to +-7, 1 up to +-15, none beyond.
    size = ((magnitude >> 23) - 127).abs()
    dropped = 20 + (size > 3).to(torch.int32) + (size > 7) + (size > 15)
    # Half of the last kept place is added, then the rest cut off: ties go away from zero.
    rounded = ((magnitude + (1 << (dropped - 1))) >> dropped) << dropped
    # The smallest value is 2^-22; [2^-23, 2^-22) rounds to it, and anything below 2^-23 to zero.
    rounded = torch.where(magnitude < 105 << 23, 105 << 23, rounded)

    code = _compose((rounded >> 23) - 127, (rounded >> 20) & 7)
    code = torch.where(magnitude < 104 << 23, ZERO, code)
    code = torch.where(magnitude >= _OVERFLOW_BITS, MAX_FINITE if overflow == "saturate" else INFINITY, code)
    code = torch.where(magnitude == _INF_BITS, INFINITY, code)
    code = torch.where((bits < 0) & (code != ZERO), code | 0x80, code)
    return torch.where(magnitude > _INF_BITS, NAN, code).to(torch.uint8)


def code_value(code: int) -> float:
    """The value of one code, field by field from the format's table."""
    sign, low = (-1.0 if code & 0x80 else 1.0), code & 0x7F
    if code == ZERO:
        return 0.0
    if code == NAN:
        return float("nan")
    if low == INFINITY:
        return sign * float("inf")
    if low < 0x08:
        return sign * 2.0 ** (low - 23)
    if low < 0x10:
        return sign * (1 + (low & 7) / 8)
    dot = 1 if low < 0x20 else 2 if low < 0x40 else 3 if low < 0x60 else 4
    mantissa_bits = {1: 3, 2: 3, 3: 2, 4: 1}[dot]
    # `dot` exponent bits: its sign, then the magnitude below the implicit leading one.
    field, lead = (low >> mantissa_bits) & ((1 << dot) - 1), 1 << (dot - 1)
    exponent = (lead | (field & (lead - 1))) * (-1 if field & lead else 1)
    fraction = (low & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    return sign * (1 + fraction) * 2.0**exponent


def _compose(exponent: Tensor, mantissa: Tensor) -> Tensor:
    """Positive codes of rounded numbers from their exponent (-22..15) and the top three mantissa bits."""
    size, negative = exponent.abs(), (exponent < 0).to(torch.int32)
    code = 0x60 | negative << 4 | (size - 8) << 1 | mantissa >> 2
    code = torch.where(size < 8, 0x40 | negative << 4 | (size - 4) << 2 | mantissa >> 1, code)
    code = torch.where(size < 4, 0x20 | negative << 4 | (size - 2) << 3 | mantissa, code)
    code = torch.where(size == 1, 0x10 | negative << 3 | mantissa, code)
    code = torch.where(size == 0, 0x08 | mantissa, code)
    return torch.where(exponent < -15, exponent + 23, code)


def _bf16_words() -> Tensor:
    """Every bfloat16 bit pattern widened to an FP32 word, index = pattern: int32 [65536]."""
    return torch.arange(65536, dtype=torch.int32) << 16
