"""MXFP8 for the reference backend: E4M3 codes with an E8M0 scale per 32 along the contracted axis.

Codes and values come from the CPU kernels where they run, else from quaver.formats.mxfp8; the bits are the same.
May import: torch, formats, native, codec, contract.
"""

from __future__ import annotations

import torch

from quaver.backends import native
from quaver.backends.codec import Coded, Factors, Sides, scale_misfit
from quaver.backends.contract import Layout, Orientation, QuantizedOperand, ScalingSpec
from quaver.backends.native import experts, kernels, packing
from quaver.backends.native.kernels import Want
from quaver.backends.sources import RowSource
from quaver.formats import mxfp8

# Scale bytes whose blocks decode to normal BF16 numbers; outside, BF16 GEMMs of CPUs flush subnormals.
FIRST_BF16_SCALE, LAST_BF16_SCALE = 10, 246
SMALLEST_NORMAL = 2.0**-126


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
        sides = Sides(Want.CODES, None) if orientation == "row" else Sides(None, Want.CODES)
        for coded in self.code_sides(tensor, spec, sides, group_list, None) or ():
            if coded is not None and coded.codes is not None:
                return coded.codes, coded.scale
        if group_list is not None and orientation == "col":
            return mxfp8.quantize_groups(tensor, group_list, scale_rule=rule)
        return mxfp8.quantize(tensor, axis=-1 if orientation == "row" else -2, scale_rule=rule)

    def code_sides(
        self,
        tensor: torch.Tensor | RowSource,
        spec: ScalingSpec,
        sides: Sides,
        group_list: torch.Tensor | None,
        amax: torch.Tensor | None,
    ) -> tuple[Coded | None, Coded | None] | None:
        """See `KernelCodec`; a tensor, rule or group list that is wrong is left to the codec that says so."""
        rule = spec.scale_rule or "floor"
        ends = group_list if sides.col is not None else None
        if not isinstance(tensor, torch.Tensor):
            if not native.usable() or rule not in ("floor", "rceil") or amax is not None:
                return None
            found = experts.quantize(tensor, rceil=rule == "rceil", row=sides.row, col=sides.col, ends=ends)
            if found is not None:
                return found[0] and Coded(*found[0]), found[1] and Coded(*found[1])
            tensor = tensor.tensor()
        sound = rule in ("floor", "rceil") and amax is None and tensor.ndim in (2, 3)
        if not sound or tensor.dtype not in (torch.float32, torch.bfloat16) or not native.usable(tensor):
            return None
        if ends is not None and not (tensor.ndim == 2 and kernels.ends_fit(ends, tensor.shape[0])):
            return None
        row, col = kernels.quantize(tensor, rceil=rule == "rceil", row=sides.row, col=sides.col, ends=ends)
        return row and Coded(*row), col and Coded(*col)

    def codes_of(
        self, values: torch.Tensor, scale: torch.Tensor, orientation: Orientation, group_list: torch.Tensor | None
    ) -> torch.Tensor:
        """See `KernelCodec`: values divide exactly by their scales."""
        if group_list is None or orientation == "row":
            return mxfp8.encode_with_scales(values, scale, axis=-1 if orientation == "row" else -2)
        codes = torch.empty(values.shape, dtype=torch.uint8, device=values.device)
        row = block = 0
        for end, block_end in zip(group_list.tolist(), mxfp8.group_scale_ends(group_list).tolist()):
            codes[row:end] = mxfp8.encode_with_scales(values[row:end], scale[block:block_end], axis=0)
            row, block = end, block_end
        return codes

    def pack(self, weight: QuantizedOperand, layout: Layout, expert: int | None = None) -> torch.Tensor | None:
        """See `KernelCodec`: y = x w^T contracts along rows as stored, y = x w along columns."""
        codes, scales, columns = weight.data, weight.scale, layout == "NN"
        if codes.ndim == 3 and stored_transposed(codes):
            codes, scales, columns = codes.transpose(-1, -2), scales.transpose(-1, -2), not columns
        if expert is not None:
            codes, scales = codes[expert], scales[expert]
        return packing.pack(codes, scales, columns=columns)

    def turned(self, weight: QuantizedOperand) -> Factors | None:
        """None: large weights are packed."""
        return None

    def misfit(self, operand: QuantizedOperand, ends: list[int] | None) -> str | None:
        """Scales are bytes, one per block of the blocked axis; blocks restart at each group."""
        axis = len(operand.shape) - (1 if operand.orientation == "row" else 2)
        wanted = list(operand.shape)
        if ends is not None and operand.orientation == "col":
            wanted[axis] = sum(-(-(end - start) // mxfp8.BLOCK) for start, end in zip([0, *ends], ends))
        else:
            wanted[axis] = -(-wanted[axis] // mxfp8.BLOCK)
        return scale_misfit(operand, torch.uint8, [tuple(wanted)])

    def factors(
        self, operand: QuantizedOperand, dtype: torch.dtype, group_list: torch.Tensor | None = None
    ) -> Factors:
        """Dequantised values, BF16 when every block is a normal BF16 number, else FP32; no alpha."""
        if dtype is torch.bfloat16 and operand.values is not None:
            return Factors(operand.values, None)
        if dtype is torch.bfloat16 and native.usable(operand.data, operand.scale):
            found = self._decode_by_kernel(operand, group_list)
            return Factors(self._decode(operand, torch.float32, group_list) if found is None else found, None)
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
    def _decode_by_kernel(operand: QuantizedOperand, group_list: torch.Tensor | None) -> torch.Tensor | None:
        """BF16 values, None where BF16 would lose something."""
        codes, scales = operand.data, operand.scale
        if group_list is not None and operand.orientation == "col":
            return kernels.decode_columns(codes, scales, group_list)
        rows = operand.orientation == "row"
        if stored_transposed(codes):
            codes, scales, rows = codes.transpose(-1, -2), scales.transpose(-1, -2), not rows
            found = kernels.decode_rows(codes, scales) if rows else kernels.decode_columns(codes, scales)
            return None if found is None else found.transpose(-1, -2)
        return kernels.decode_rows(codes, scales) if rows else kernels.decode_columns(codes, scales)

    @staticmethod
    def _decode(
        operand: QuantizedOperand, dtype: torch.dtype, group_list: torch.Tensor | None
    ) -> torch.Tensor:
        codes, scales = operand.data, operand.scale
        if group_list is not None and operand.orientation == "col":
            return mxfp8.dequantize_groups(codes, scales, group_list, dtype)
        axis = -1 if operand.orientation == "row" else -2
        if stored_transposed(codes):
            stored = mxfp8.dequantize(
                codes.transpose(-1, -2), scales.transpose(-1, -2), axis=-3 - axis, dtype=dtype
            )
            return stored.transpose(-1, -2)
        return mxfp8.dequantize(codes, scales, axis=axis, dtype=dtype)


def stored_transposed(codes: torch.Tensor) -> bool:
    """True of a grouped weight that is stored [E, N, K] and seen as [E, K, N]: decode as stored, then view again."""
    return codes.ndim == 3 and not codes.is_contiguous() and codes.transpose(-1, -2).is_contiguous()


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
