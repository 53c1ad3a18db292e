"""How the reference backend quantises and decodes each format: one codec a format, as data in a mapping.

A codec turns a tensor into (codes, scale) and back into *exact GEMM factors*: values that the GEMM multiplies
without any loss before its accumulation, and the factors (`alpha`) that belong behind it. A new format is one
more codec handed to `ReferenceBackend(codecs=...)`. May import: torch, formats, contract.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from quaver.backends.contract import Orientation, QuantizedOperand, ScalingSpec
from quaver.formats import hif8, mxfp8

# Scale bytes whose blocks decode to normal BF16 numbers; outside, BF16 GEMMs of CPUs flush subnormals.
FIRST_BF16_SCALE, LAST_BF16_SCALE = 10, 246
SMALLEST_NORMAL = 2.0**-126


@dataclass(frozen=True)
class Factors:
    """One operand as the GEMM multiplies it.

    Args:
        values: BF16 where that is exact and safe, else FP32; the operand's own shape.
        alpha: None, or the FP32 scale(s) to apply behind the accumulation: 0-d, or [E].
    """

    values: torch.Tensor
    alpha: torch.Tensor | None


class Codec(Protocol):
    """Quantise and decode one format."""

    axis_free: bool  # one scale without an axis: both orientations share storage

    def quantize(
        self,
        tensor: torch.Tensor,
        spec: ScalingSpec,
        orientation: Orientation,
        group_list: torch.Tensor | None,
        amax: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(codes, scale) of a tensor; see `Backend.quantize`."""

    def misfit(self, operand: QuantizedOperand, ends: list[int] | None) -> str | None:
        """Why an operand's scale does not belong to its codes, in one sentence; None where it does.

        `ends`: of a token axis that is contracted group by group.
        """

    def factors(
        self, operand: QuantizedOperand, dtype: torch.dtype, group_list: torch.Tensor | None = None
    ) -> Factors:
        """Exact GEMM factors; `dtype` BF16 is a wish that an operand may refuse by answering FP32."""


@runtime_checkable
class BlockCodec(Protocol):
    """What a codec with blocks along the rows offers besides, for weights whose shards cut blocks."""

    def column_scales(self, tensor: torch.Tensor, spec: ScalingSpec, row0: int) -> torch.Tensor:
        """Scale bytes of the touched blocks."""

    def quantize_columns(
        self, tensor: torch.Tensor, scales: torch.Tensor, spec: ScalingSpec, row0: int
    ) -> torch.Tensor:
        """Codes under given scale bytes."""


class MXFP8Codec:
    """E4M3 elements with an E8M0 scale per 32 along the contracted axis (quaver.formats.mxfp8)."""

    axis_free = False

    def quantize(
        self,
        tensor: torch.Tensor,
        spec: ScalingSpec,
        orientation: Orientation,
        group_list: torch.Tensor | None,
        amax: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(codes, E8M0 bytes); `amax` has no meaning for block scales and is refused."""
        if amax is not None:
            raise ValueError("MXFP8 scales come from each block; amax cannot be given")
        rule = spec.scale_rule or "floor"
        if group_list is not None and orientation == "col":
            return mxfp8.quantize_groups(tensor, group_list, scale_rule=rule)
        return mxfp8.quantize(tensor, axis=-1 if orientation == "row" else -2, scale_rule=rule)

    def misfit(self, operand: QuantizedOperand, ends: list[int] | None) -> str | None:
        """Scales are bytes, one per block of the blocked axis; blocks restart at each group."""
        axis = operand.data.ndim - (1 if operand.orientation == "row" else 2)
        wanted = list(operand.shape)
        if ends is not None and operand.orientation == "col":
            wanted[axis] = sum(-(-(end - start) // mxfp8.BLOCK) for start, end in zip([0, *ends], ends))
        else:
            wanted[axis] = -(-wanted[axis] // mxfp8.BLOCK)
        return _scale_misfit(operand, torch.uint8, [tuple(wanted)])

    def factors(
        self, operand: QuantizedOperand, dtype: torch.dtype, group_list: torch.Tensor | None = None
    ) -> Factors:
        """Dequantised values, BF16 when every block is a normal BF16 number, else FP32; no alpha."""
        if dtype is torch.bfloat16 and not _may_be_bf16(operand.scale):
            dtype = torch.float32
        values = self._decode(operand, dtype, group_list)
        if dtype is torch.bfloat16 and not _zero_blocks_hold_zeros(operand, values):
            values = self._decode(operand, torch.float32, group_list)
        return Factors(values, None)

    def column_scales(self, tensor: torch.Tensor, spec: ScalingSpec, row0: int) -> torch.Tensor:
        """Scale bytes [touched blocks, K] of the blocks of 32 rows that rows [row0, row0 + M) touch."""
        bits = mxfp8.amax_bits(_from_block_start(tensor, row0), axis=0)
        return mxfp8.exponents_from_amax_bits(bits, spec.scale_rule or "floor")

    def quantize_columns(
        self, tensor: torch.Tensor, scales: torch.Tensor, spec: ScalingSpec, row0: int
    ) -> torch.Tensor:
        """Codes [M, K] under the scales of the touched blocks."""
        shifted = _from_block_start(tensor, row0)
        return mxfp8.encode_with_scales(shifted, scales, axis=0)[row0 % mxfp8.BLOCK :].contiguous()

    @staticmethod
    def _decode(
        operand: QuantizedOperand, dtype: torch.dtype, group_list: torch.Tensor | None
    ) -> torch.Tensor:
        codes, scales = operand.data, operand.scale
        if group_list is not None and operand.orientation == "col":
            return mxfp8.dequantize_groups(codes, scales, group_list, dtype)
        axis = -1 if operand.orientation == "row" else -2
        if codes.ndim == 3 and not codes.is_contiguous() and codes.transpose(-1, -2).is_contiguous():
            # a grouped weight is stored [E, N, K] and seen as [E, K, N]: decode as stored, then view again
            stored = mxfp8.dequantize(
                codes.transpose(-1, -2), scales.transpose(-1, -2), axis=-3 - axis, dtype=dtype
            )
            return stored.transpose(-1, -2)
        return mxfp8.dequantize(codes, scales, axis=axis, dtype=dtype)


def _from_block_start(tensor: torch.Tensor, row0: int) -> torch.Tensor:
    """The rows with zeros in front, so that they start where their first block starts; zeros move no maximum."""
    missing = row0 % mxfp8.BLOCK
    return torch.nn.functional.pad(tensor, (0, 0, missing, 0)) if missing else tensor


def _may_be_bf16(scales: torch.Tensor) -> bool:
    """True if no block but a zero one (byte 0) lies outside the bytes that decode to normal BF16 numbers."""
    if scales.numel() == 0:
        return True
    low, high = (int(v) for v in torch.aminmax(scales))
    if high > LAST_BF16_SCALE:
        return False
    return low >= FIRST_BF16_SCALE or not bool(((scales < FIRST_BF16_SCALE) & (scales > 0)).any())


def _zero_blocks_hold_zeros(operand: QuantizedOperand, values: torch.Tensor) -> bool:
    """True if scale byte 0 stands on zero blocks alone: a nonzero code there may be subnormal, or lost."""
    if operand.scale.numel() == 0 or int(operand.scale.min()) > 0:
        return True
    lost = ((operand.data & 0x7F) != 0) & (values.abs() < SMALLEST_NORMAL)
    return not bool(lost.any())


class HiF8Codec:
    """HiF8 elements with one FP32 scale per tensor, or per leading index of a 3-D weight."""

    axis_free = True

    def quantize(
        self,
        tensor: torch.Tensor,
        spec: ScalingSpec,
        orientation: Orientation,
        group_list: torch.Tensor | None,
        amax: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(codes, FP32 scale): scale = amax / format_max where that is finite and positive, else 1."""
        if spec.format_max is None:
            raise ValueError("HiF8 needs a format_max in its ScalingSpec")
        if amax is None:
            amax = tensor_amax(tensor)
        scale = hif8.scale_from_amax(amax, spec.format_max)
        spread = scale.view(-1, 1, 1) if scale.ndim == 1 else scale
        return hif8.quantize(tensor, spread), scale

    def misfit(self, operand: QuantizedOperand, ends: list[int] | None) -> str | None:
        """One FP32 scale, or one per expert of a 3-D weight."""
        shapes = [(), operand.shape[:1]] if operand.data.ndim == 3 else [()]
        return _scale_misfit(operand, torch.float32, shapes)

    def factors(
        self, operand: QuantizedOperand, dtype: torch.dtype, group_list: torch.Tensor | None = None
    ) -> Factors:
        """Decoded codes (every HiF8 value is a normal BF16 number) and the scale as alpha."""
        table = hif8.decode_table(dtype, operand.data.device)
        return Factors(torch.take(table, operand.data.long()), operand.scale)


def _scale_misfit(
    operand: QuantizedOperand, dtype: torch.dtype, shapes: Sequence[tuple[int, ...]]
) -> str | None:
    found, scale = tuple(operand.scale.shape), operand.scale
    if scale.dtype is dtype and found in [tuple(shape) for shape in shapes]:
        return None
    return (
        f"the {operand.orientation} scale of {tuple(operand.shape)} codes is {scale.dtype} {found},"
        f" {operand.format} wants {dtype} {' or '.join(str(tuple(shape)) for shape in shapes)}"
    )


def tensor_amax(tensor: torch.Tensor) -> torch.Tensor:
    """FP32 amax: 0-d of a 2-D tensor, [E] of a 3-D one; 0 for an empty tensor; NaN if there is one."""
    dims = tuple(range(tensor.ndim))[1:] if tensor.ndim == 3 else tuple(range(tensor.ndim))
    if tensor.numel() == 0:
        shape = tensor.shape[:1] if tensor.ndim == 3 else ()
        return torch.zeros(shape, dtype=torch.float32, device=tensor.device)
    return tensor.abs().amax(dims).float()


BUILTIN_CODECS: dict[str, Codec] = {"mxfp8_e4m3": MXFP8Codec(), "hif8": HiF8Codec()}
