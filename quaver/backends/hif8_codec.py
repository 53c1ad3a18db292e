"""HiF8 for the reference backend: one FP32 scale per tensor, or per leading index of a 3-D weight.

Codes and values come from the CPU kernels where they run, else from quaver.formats.hif8; the bits are the same.
May import: torch, formats, native, codec, contract.
"""

from __future__ import annotations

import torch

from quaver.backends import native
from quaver.backends.codec import Coded, Factors, Sides, scale_misfit
from quaver.backends.contract import Layout, Orientation, QuantizedOperand, ScalingSpec
from quaver.backends.native import experts, kernels
from quaver.backends.native.kernels import Want
from quaver.backends.sources import RowSource
from quaver.formats import hif8

TURNED_FROM = 1 << 21  # elements of a weight from which an NN product gains by having it column by column (measured)


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
        coded = self._code(tensor, spec, amax, Want.CODES)
        assert coded.codes is not None  # asked for
        return coded.codes, coded.scale

    def code_sides(
        self,
        tensor: torch.Tensor | RowSource,
        spec: ScalingSpec,
        sides: Sides,
        group_list: torch.Tensor | None,
        amax: torch.Tensor | None,
    ) -> tuple[Coded | None, Coded | None] | None:
        """See `KernelCodec`: one pass serves both directions."""
        if not isinstance(tensor, torch.Tensor):
            if not native.usable():
                return None
            tensor, own = experts.fill(tensor) or (tensor.tensor(), None)
            amax = own if amax is None else amax
        if tensor.dtype not in (torch.float32, torch.bfloat16) or not native.usable(tensor):
            return None
        wanted = [side for side in sides if side is not None]
        codes, values = any(want.codes for want in wanted), any(want.values for want in wanted)
        want = (Want.BOTH if values else Want.CODES) if codes else Want.VALUES
        coded = self._code(tensor, spec, amax, want)
        return coded if sides.row is not None else None, coded if sides.col is not None else None

    def codes_of(
        self, values: torch.Tensor, scale: torch.Tensor, orientation: Orientation, group_list: torch.Tensor | None
    ) -> torch.Tensor:
        """See `KernelCodec`: values are codes without their scale."""
        return hif8.encode(values)

    def pack(self, weight: QuantizedOperand, layout: Layout, expert: int | None = None) -> torch.Tensor | None:
        """None: the scale goes into the GEMM as its alpha, which a packed product does not take."""
        return None

    def turned(self, weight: QuantizedOperand) -> Factors | None:
        """See `KernelCodec`: decoding a large weight transposed costs half of what the product then saves."""
        if weight.data.numel() < TURNED_FROM or weight.data.ndim != 2 or not native.usable(weight.data):
            return None
        return Factors(kernels.hif8_decode_transposed(weight.data).t(), weight.scale)

    @staticmethod
    def _code(
        tensor: torch.Tensor, spec: ScalingSpec, amax: torch.Tensor | None, want: Want
    ) -> Coded:
        if spec.format_max is None:
            raise ValueError("HiF8 needs a format_max in its ScalingSpec")
        floats = tensor.dtype in (torch.float32, torch.bfloat16)
        if amax is None and floats and tensor.ndim in (2, 3) and native.usable(tensor):
            return Coded(*kernels.hif8_quantize(tensor, kernels.hif8_scales(tensor, spec.format_max), want=want))
        scale = hif8.scale_from_amax(tensor_amax(tensor) if amax is None else amax, spec.format_max)
        one_each = scale.ndim == 0 or (tensor.ndim == 3 and scale.shape == tensor.shape[:1])
        if floats and one_each and native.usable(tensor, scale):
            return Coded(*kernels.hif8_quantize(tensor, scale, want=want))
        spread = scale.view(-1, 1, 1) if scale.ndim == 1 else scale
        return Coded(hif8.quantize(tensor, spread), scale, None)

    def misfit(self, operand: QuantizedOperand, ends: list[int] | None) -> str | None:
        """One FP32 scale, or one per expert of a 3-D weight."""
        shapes = [(), operand.shape[:1]] if len(operand.shape) == 3 else [()]
        return scale_misfit(operand, torch.float32, shapes)

    def factors(
        self, operand: QuantizedOperand, dtype: torch.dtype, group_list: torch.Tensor | None = None
    ) -> Factors:
        """Decoded codes (every HiF8 value is a normal BF16 number) and the scale as alpha."""
        if dtype is torch.bfloat16 and operand.values is not None:
            return Factors(operand.values, operand.scale)
        if dtype is torch.bfloat16 and native.usable(operand.data):
            if operand.data.ndim == 3 and not operand.data.is_contiguous():  # stored [E, N, K], seen as [E, K, N]
                stored = kernels.hif8_decode(operand.data.transpose(-1, -2))
                return Factors(stored.transpose(-1, -2), operand.scale)
            return Factors(kernels.hif8_decode(operand.data), operand.scale)
        table = hif8.decode_table(dtype, operand.data.device)
        return Factors(torch.take(table, operand.data.long()), operand.scale)


def tensor_amax(tensor: torch.Tensor) -> torch.Tensor:
    """FP32 amax: 0-d of a 2-D tensor, [E] of a 3-D one; 0 for an empty tensor; NaN if there is one."""
    dims = tuple(range(tensor.ndim))[1:] if tensor.ndim == 3 else tuple(range(tensor.ndim))
    if tensor.ndim in (2, 3) and tensor.dtype in (torch.float32, torch.bfloat16) and native.usable(tensor):
        return kernels.amax(tensor)
    if tensor.numel() == 0:
        shape = tensor.shape[:1] if tensor.ndim == 3 else ()
        return torch.zeros(shape, dtype=torch.float32, device=tensor.device)
    return tensor.abs().amax(dims).float()
