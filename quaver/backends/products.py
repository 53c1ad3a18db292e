"""One product of exact GEMM factors: FP32 accumulation, one alpha, one rounding. May import: torch."""

from __future__ import annotations

import math

import torch

Alpha = torch.Tensor | float | None


def product(a: torch.Tensor | None, b: torch.Tensor | None, expert: int | None = None) -> Alpha:
    """alpha_a * alpha_b in FP64, where two FP32 factors multiply exactly; [E] scales indexed by `expert`.

    A number on the CPU; elsewhere a 0-d tensor, since reading it would stall the device. None where neither
    operand has a scale.
    """
    scales = [s[expert] if s.ndim == 1 and expert is not None else s for s in (a, b) if s is not None]
    if not scales:
        return None
    if scales[0].device.type == "cpu":
        return math.prod(scale.item() for scale in scales)
    alpha = scales[0].double()
    for scale in scales[1:]:
        alpha = alpha * scale.double()
    return alpha


def multiply(
    a: torch.Tensor,
    b: torch.Tensor,
    alpha: Alpha,
    output_dtype: torch.dtype,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """a @ b * alpha, accumulated in FP32 and rounded once to `output_dtype`; into `out` where it is given."""
    if (
        a.dtype is not b.dtype or output_dtype is torch.float32
    ):  # one operand refused BF16: both go the FP32 way
        a, b = a.float(), b.float()
    if torch.is_autocast_enabled(a.device.type):
        with torch.autocast(a.device.type, enabled=False):  # autocast would round FP32 factors to BF16
            return multiply(a, b, alpha, output_dtype, out)
    if a.device.type == "cuda" and (cuda := torch.backends.cuda.matmul).allow_bf16_reduced_precision_reduction:
        cuda.allow_bf16_reduced_precision_reduction = False  # torch's default adds partial sums in BF16
        try:
            return multiply(a, b, alpha, output_dtype, out)
        finally:
            cuda.allow_bf16_reduced_precision_reduction = True
    if a.dtype is torch.bfloat16 and alpha is not None:
        if isinstance(alpha, float):
            # alpha inside the GEMM: the FP32 accumulate is scaled before the one rounding, with no copy
            return torch.addmm(a.new_zeros(()), a, b, beta=0, alpha=alpha, out=out)
        a, b = a.float(), b.float()
    if alpha is None and (out is None or out.dtype is a.dtype):
        return torch.mm(a, b, out=out).to(output_dtype)
    product_FP32 = torch.mm(a, b)
    if alpha is not None:
        # FP32 outputs are scaled in FP64: an FP32 alpha would be a rounding more than the accumulation's own
        wide = product_FP32.double() if output_dtype is torch.float32 else product_FP32
        product_FP32 = wide * (alpha if isinstance(alpha, float) else alpha.to(wide.dtype))
    return product_FP32.to(output_dtype) if out is None else out.copy_(product_FP32)
