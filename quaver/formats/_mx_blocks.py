"""MXFP8 on blocks of 32 along one axis: amax bits -> scale byte -> E4M3 codes, and back.

Everything that decides a scale works on the FP32 bit pattern of a block's largest magnitude. As integers
those patterns order like the magnitudes, with Inf above every number and NaN above Inf, so one integer
maximum carries both the exponent and the non-finite policy, and shards of one block may exchange it. Imports
torch alone.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from quaver.formats._common import (
    check_codes,
    check_decoded_dtype,
    check_float,
    constant,
    host_amax,
    lookup,
    pieces,
)

BLOCK = 32
"""Elements that share a scale (OCP MX v1.0)."""

NAN_SCALE = 255
"""Scale byte of a block that holds NaN or Inf; the whole block decodes to NaN."""

_E4M3_MAX = 448.0
_E4M3_NAN = 0x7F
_INF_BITS = 0x7F800000


def amax_bits(x: Tensor, *, axis: int = -1) -> Tensor:
    """The FP32 bit pattern of the largest magnitude in each block of 32 along `axis`.

    Args:
        x: float32 or bfloat16, at least 1-d; the last block may be short.

    Returns:
        int32, non-negative, shaped as `x` but ceil(n / 32) long on `axis`. A block that holds NaN gives a
        pattern above 0x7F800000, one that holds Inf at least that. Maxima over parts of a block combine by
        integer maximum.

    Raises:
        TypeError: another dtype. ValueError: 0-d. IndexError: no such axis.
    """
    check_float(x, "mxfp8.amax_bits")
    axis = normal_axis(x, axis)
    if x.numel() == 0:
        return torch.empty(scale_shape(x.shape, axis), dtype=torch.int32, device=x.device)
    return _reduce_amax(blocked(x.detach(), axis).float(), axis + 1).squeeze(axis + 1).contiguous()


def exponents_from_amax_bits(amax_bits: Tensor, scale_rule: str = "floor") -> Tensor:
    """E8M0 scale bytes from the FP32 bit patterns of block maxima.

    "floor" is floor(log2 amax) - 8; "rceil" is the smallest e with 448 * 2^e >= amax. Both are clamped at
    -127 (byte 0). A maximum that is Inf or NaN gives byte 255.

    Args:
        amax_bits: int32, non-negative, any shape.

    Returns:
        uint8, same shape.

    Raises:
        TypeError: not int32. ValueError: another rule.
    """
    if amax_bits.dtype != torch.int32:
        raise TypeError(f"mxfp8.exponents_from_amax_bits takes int32 bit patterns, not {amax_bits.dtype}")
    check_rule(scale_rule)
    # 448 = 1.75 * 2^8: under rceil a mantissa above .75 (0x600000) carries into the exponent, exactly.
    exponent = (amax_bits if scale_rule == "floor" else amax_bits + 0x1FFFFF) >> 23
    scales = exponent.sub_(8).clamp_min_(0)
    return scales.masked_fill_(amax_bits >= _INF_BITS, NAN_SCALE).to(torch.uint8)


def encode_with_scales(x: Tensor, scales: Tensor, *, axis: int = -1) -> Tensor:
    """E4M3 codes of x / 2^(scale - 127): exact division, round to nearest even, saturating at +-448.

    Scale byte 0 divides by 2^-127, also in a block of subnormals; byte 255 gives codes 0. Under any other
    byte NaN and Inf elements become the NaN codes 7F / FF: a scale that overlooked them hides nothing.

    Args:
        x: float32 or bfloat16, at least 1-d.
        scales: uint8, shaped as `x` but ceil(n / 32) long on `axis`.

    Returns:
        uint8 codes, contiguous, shaped as `x`.

    Raises:
        TypeError: another dtype. ValueError: 0-d, or scales of another shape. IndexError: no such axis.
    """
    check_float(x, "mxfp8.encode_with_scales")
    axis = normal_axis(x, axis)
    check_scales(scales, x.shape, axis)
    x_blocks, scales = blocked(x.detach(), axis), scales.unsqueeze(axis + 1)
    codes = torch.empty(x_blocks.shape, dtype=torch.uint8, device=x.device)
    for part in _parts(x_blocks, axis + 1):
        x_FP32 = x_blocks[part].float()
        _encode_into(codes[part], x_FP32, scales[part])
        peak = host_amax(_reduce_amax(x_FP32, axis + 1))
        if peak is None or peak >= _INF_BITS:
            codes[part].masked_fill_(x_FP32.isposinf() & (scales[part] != NAN_SCALE), _E4M3_NAN)
            codes[part].masked_fill_(x_FP32.isneginf() & (scales[part] != NAN_SCALE), _E4M3_NAN | 0x80)
    return unblocked(codes, axis, x.shape[axis])


def dequantize(
    codes: Tensor, scales: Tensor, *, axis: int = -1, dtype: torch.dtype = torch.float32
) -> Tensor:
    """E4M3(code) * 2^(scale - 127), rounded once to `dtype`.

    float32 is exact for every code at scale bytes 0..246; above, a large code may exceed the FP32 range and
    become Inf. bfloat16 is exact for every code at bytes 3..246, and at **10..246** no value is a BF16
    subnormal, which CPU GEMMs flush to zero. Byte 255 gives NaN.

    Args:
        codes: uint8, at least 1-d.
        scales: uint8, shaped as `codes` but ceil(n / 32) long on `axis`.
        dtype: torch.float32 or torch.bfloat16.

    Returns:
        values, contiguous, shaped as `codes`.

    Raises:
        TypeError: another dtype. ValueError: 0-d, or scales of another shape. IndexError: no such axis.
    """
    check_codes(codes, "mxfp8.dequantize")
    check_decoded_dtype(dtype, "mxfp8.dequantize")
    axis = normal_axis(codes, axis)
    check_scales(scales, codes.shape, axis)
    values = lookup(e4m3_table(dtype, codes.device), blocked(codes, axis))
    return unblocked(values.mul_(scale_values(scales, dtype).unsqueeze(axis + 1)), axis, codes.shape[axis])


def blocked(x: Tensor, axis: int) -> Tensor:
    """[..., n, ...] -> [..., ceil(n / 32), 32, ...]: a view, or a zero-padded copy for a short last block."""
    length = x.shape[axis]
    short = -length % BLOCK
    if short:
        x = F.pad(x, [0, 0] * (x.dim() - 1 - axis) + [0, short])
    return x.unflatten(axis, ((length + short) // BLOCK, BLOCK))


def unblocked(blocks: Tensor, axis: int, length: int) -> Tensor:
    """The inverse of `blocked`: [..., n / 32, 32, ...] -> [..., length, ...], contiguous."""
    return blocks.flatten(axis, axis + 1).narrow(axis, 0, length).contiguous()


def quantize_blocked(x_blocks: Tensor, block_axis: int, scale_rule: str) -> tuple[Tensor, Tensor]:
    """(codes, scales) of a blocked view, contiguous; the scales keep `block_axis`, but with length 1."""
    check_rule(scale_rule)
    codes = torch.empty(x_blocks.shape, dtype=torch.uint8, device=x_blocks.device)
    scales = codes.new_empty([1 if i == block_axis else n for i, n in enumerate(x_blocks.shape)])
    for part in _parts(x_blocks, block_axis):
        x_FP32 = x_blocks[part].float()  # exact, and on a CPU int32 maxima are faster than int16 ones
        scales[part] = exponents_from_amax_bits(_reduce_amax(x_FP32, block_axis), scale_rule)
        _encode_into(codes[part], x_FP32, scales[part])
    return codes, scales


def scale_values(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """2^(scale - 127) in `dtype`, NaN at byte 255, exact (byte 0 is a subnormal)."""
    return _power_of_two(scales.to(torch.int16), dtype).masked_fill_(scales == NAN_SCALE, torch.nan)


def e4m3_table(dtype: torch.dtype, device: torch.device) -> Tensor:
    """The values of all 256 E4M3FN codes, exact in float32 and bfloat16: [256]."""
    return constant(
        f"e4m3_values_{dtype}",
        device,
        lambda: torch.tensor([_e4m3_value(code) for code in range(256)], dtype=dtype),
    )


def normal_axis(x: Tensor, axis: int) -> int:
    """`axis` counted from the front. ValueError for 0-d, IndexError where there is no such axis."""
    if x.dim() == 0:
        raise ValueError("MXFP8 takes at least one axis to run its blocks along; a 0-d tensor has none")
    if not -x.dim() <= axis < x.dim():
        raise IndexError(f"axis {axis} is out of range for a tensor of shape {tuple(x.shape)}")
    return axis % x.dim()


def check_rule(scale_rule: str) -> None:
    """ValueError unless the rule is one of the two."""
    if scale_rule not in ("floor", "rceil"):
        raise ValueError(f'scale_rule is "floor" or "rceil", not {scale_rule!r}')


def check_scales(scales: Tensor, shape: torch.Size, axis: int) -> None:
    """TypeError unless `scales` is uint8, ValueError unless it fits `shape` in blocks along `axis`."""
    check_codes(scales, "MXFP8 scales")
    expected = scale_shape(shape, axis)
    if tuple(scales.shape) != expected:
        raise ValueError(
            f"scales of shape {tuple(scales.shape)} do not fit a tensor of shape {tuple(shape)} in blocks of"
            f" {BLOCK} along axis {axis}; expected {expected}"
        )


def scale_shape(shape: torch.Size, axis: int) -> tuple[int, ...]:
    """The shape of the scales of a tensor of `shape` with blocks along the non-negative `axis`."""
    return (*shape[:axis], -(-shape[axis] // BLOCK), *shape[axis + 1 :])


def _parts(x_blocks: Tensor, block_axis: int) -> Iterator[tuple[slice, ...]]:
    """Indices of the parts to work in, cut along the first axis that can be cut; none of an empty tensor."""
    if x_blocks.numel() == 0:
        return
    axis = next((i for i, n in enumerate(x_blocks.shape) if n > 1 and i != block_axis), 0)
    length = x_blocks.shape[axis]
    for part in pieces(length, x_blocks.numel() // length, x_blocks.device):
        yield (*[slice(None)] * axis, part)


def _encode_into(codes: Tensor, x_FP32: Tensor, scales: Tensor) -> None:
    # 2^(127 - scale) as a bit pattern: 254 - scale is its biased exponent, but for byte 254 a subnormal. The
    # product is exact, unless it underflows far below E4M3's smallest step, where it rounds to zero anyhow.
    scaled = x_FP32 * _power_of_two(254 - scales.to(torch.int16), torch.float32)
    codes.view(torch.float8_e4m3fn).copy_(scaled.clamp_(-_E4M3_MAX, _E4M3_MAX))
    if host_amax(scales) in (None, NAN_SCALE):
        codes.masked_fill_(scales == NAN_SCALE, 0)


def _reduce_amax(x_FP32: Tensor, block_axis: int) -> Tensor:
    """int32 bit patterns of the largest magnitude over `block_axis`, kept with length 1."""
    return (x_FP32.view(torch.int32) & 0x7FFFFFFF).amax(block_axis, keepdim=True)


def _power_of_two(biased: Tensor, dtype: torch.dtype) -> Tensor:
    """2^(biased - 127) for int16 biased exponents 0..254, by bit pattern; 0 is the subnormal 2^-127.

    Values outside that range (from scale byte 255, which the callers mask) give some finite or infinite
    number.
    """
    if dtype == torch.bfloat16:
        return (biased << 7).masked_fill_(biased == 0, 0x40).view(torch.bfloat16)
    return (biased.to(torch.int32) << 23).masked_fill_(biased == 0, 0x400000).view(torch.float32)


def _e4m3_value(code: int) -> float:
    """E4M3FN: bias 7, subnormals, no Inf, NaN at 7F and FF."""
    sign, exponent, mantissa = (-1.0 if code & 0x80 else 1.0), (code >> 3) & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))
