"""E5M2 with one scale a tensor, as a format of one's own: all that it takes (see docs/extending.md)."""

import torch

from quaver.backends import QuantizationRole, QuantizedOperand, ScalingSpec
from quaver.backends.codecs import Factors, tensor_amax
from quaver.low_precision import FormatExtension, PerTensorWeight, RecipeSpec

LARGEST = 57344.0  # largest finite E5M2 number (OCP 8-bit floating point, table 1)


class E5M2Codec:
    """codes = round(x / scale), scale = amax / 57344; a tensor of zeros, or one that is not finite, has scale 1."""

    axis_free = True  # one scale has no axis: the codes serve both orientations

    def quantize(self, tensor, spec: ScalingSpec, orientation, group_list, amax):
        amax = tensor_amax(tensor) if amax is None else amax
        usable = (amax > 0) & torch.isfinite(amax)
        scale = torch.where(usable, amax / spec.format_max, torch.ones_like(amax))
        spread = scale.view(-1, 1, 1) if scale.ndim == 1 else scale  # [E]: one scale an expert
        scaled = tensor.float() / spread
        finite = scaled.clamp(-spec.format_max, spec.format_max)
        scaled = torch.where(torch.isfinite(scaled), finite, scaled)  # Inf and NaN stay what they are
        return scaled.to(torch.float8_e5m2).view(torch.uint8), scale

    def misfit(self, operand: QuantizedOperand, ends) -> str | None:
        fits = operand.scale.dtype is torch.float32 and operand.scale.ndim in (0, operand.data.ndim - 2)
        return None if fits else f"E5M2 wants one FP32 scale, or one an expert, got {operand.scale.dtype}"

    def factors(self, operand: QuantizedOperand, dtype, group_list=None) -> Factors:
        return Factors(operand.data.view(torch.float8_e5m2).to(torch.bfloat16), operand.scale)


class E5M2Tensor(PerTensorWeight):
    """A quantised weight: its codes and their scale."""


SPEC = ScalingSpec("e5m2", format_max=LARGEST)
E5M2 = FormatExtension(
    recipe=RecipeSpec("e5m2/tensor@1", "e5m2", dict.fromkeys(QuantizationRole, SPEC)),
    scaling="tensor",
    codec=E5M2Codec(),
    weight_class=E5M2Tensor,
)
