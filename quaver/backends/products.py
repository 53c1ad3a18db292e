"""Products of exact GEMM factors: FP32 accumulation, one alpha, one rounding; one by one, or group by group.

Neighbouring groups of equal length go into one batched product where its bits are those of its parts: a product of 512
rows then takes 3 % less, one of 16 rows a quarter. May import: torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import torch

Alpha = torch.Tensor | float | None
Alphas = tuple[torch.Tensor | None, torch.Tensor | None]

ONEDNN_FROM = 16 * 16 * 16
"""Multiplications above which torch gives a BF16 product to oneDNN, where it takes BF16 at all."""


@cache
def onednn_multiplies() -> bool:
    """True if torch gives BF16 products of CPU tensors to oneDNN, whose sums do not depend on how operands lie."""
    # a private operator: without it nothing is taken for granted
    known = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported")
    return known and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _laid_out(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The operands with the contracted axis dense in memory, where torch's own BF16 products add up in an order that
    depends on it: a result belongs to numbers, not to where they lie."""
    if a.dtype is not torch.bfloat16 or a.device.type != "cpu" or onednn_multiplies():
        return a, b
    return a.contiguous(), b.mT.contiguous().mT


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
    """a @ b * alpha, accumulated in FP32 and rounded once to `output_dtype`; into `out` where it is given.

    Without alpha, [B, M, K] and [B, K, N] are B products.
    """
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
    a, b = _laid_out(a, b)
    if a.dtype is torch.bfloat16 and alpha is not None:
        if isinstance(alpha, float):
            # alpha inside the GEMM: the FP32 accumulate is scaled before the one rounding, with no copy
            return torch.addmm(a.new_zeros(()), a, b, beta=0, alpha=alpha, out=out)
        a, b = a.float(), b.float()
    if alpha is None and (out is None or out.dtype is a.dtype):
        return (torch.mm if a.ndim == 2 else torch.bmm)(a, b, out=out).to(output_dtype)
    product_FP32 = torch.mm(a, b)
    if alpha is not None:
        # FP32 outputs are scaled in FP64: an FP32 alpha would be a rounding more than the accumulation's own
        wide = product_FP32.double() if output_dtype is torch.float32 else product_FP32
        product_FP32 = wide * (alpha if isinstance(alpha, float) else alpha.to(wide.dtype))
    return product_FP32.to(output_dtype) if out is None else out.copy_(product_FP32)


class _Run(NamedTuple):
    """Neighbouring groups of equal length."""

    group: int  # the first one
    groups: int
    row: int  # where it starts
    rows: int  # of each

    @property
    def span(self) -> slice:
        return slice(self.row, self.row + self.groups * self.rows)

    @property
    def members(self) -> slice:
        return slice(self.group, self.group + self.groups)


def _runs(ends: list[int], each: int) -> Iterator[_Run]:
    """The groups in order, as many at a time as are equally long and may share a call.

    Args:
        ends: cumulative.
        each: multiplications a row; 0: every group goes by itself.
    """
    starts = [0, *ends]
    group = 0
    while group < len(ends):
        rows, after = ends[group] - starts[group], group + 1
        shares = rows == 0 or rows * each > ONEDNN_FROM
        while shares and after < len(ends) and ends[after] - starts[after] == rows:
            after += 1
        yield _Run(group, after - group, starts[group], rows)
        group = after


def _each(a: torch.Tensor, b: torch.Tensor, alphas: Alphas, output_dtype: torch.dtype) -> int:
    """Multiplications a row of products that may share a call; 0 where none may.

    A scale belongs to one product, and FP32 ones are added up differently; so are those that oneDNN does not get.
    """
    plain = alphas == (None, None) and a.dtype is b.dtype is output_dtype is torch.bfloat16
    return a.shape[-1] * b.shape[-1] if plain and a.device.type == "cpu" and onednn_multiplies() else 0


def multiply_rows(
    a: torch.Tensor,
    b: torch.Tensor,
    ends: list[int],
    alphas: Alphas,
    output_dtype: torch.dtype,
) -> torch.Tensor:
    """Each group's rows of a [S, K] times its own b [E, K, N]: [S, N]. Groups without rows add none.

    `alphas`: the scales of a and b, 0-d or [E].
    """
    out = a.new_empty((a.shape[0], b.shape[2]), dtype=output_dtype)
    for run in _runs(ends, _each(a, b, alphas, output_dtype)):
        if run.rows and run.groups > 1:
            shape = (run.groups, run.rows, -1)
            multiply(a[run.span].view(shape), b[run.members], None, output_dtype, out[run.span].view(shape))
        elif run.rows:
            alpha = product(*alphas, run.group)
            multiply(a[run.span], b[run.group], alpha, output_dtype, out[run.span])
    return out


def multiply_tokens(
    a: torch.Tensor,
    b: torch.Tensor,
    ends: list[int],
    alphas: Alphas,
    output_dtype: torch.dtype,
) -> torch.Tensor:
    """Each group's rows of a [S, N], turned, times those of b [S, K]: [E, N, K], zeros where a group has none.

    `alphas`: the scales of a and b, 0-d.
    """
    out = a.new_empty((len(ends), a.shape[1], b.shape[1]), dtype=output_dtype)
    alpha = product(*alphas)
    for run in _runs(ends, _each(a, b, alphas, output_dtype)):
        if not run.rows:
            out[run.members].zero_()
        elif run.groups > 1:
            shape = (run.groups, run.rows, -1)
            multiply(a[run.span].view(shape).mT, b[run.span].view(shape), None, output_dtype, out[run.members])
        else:
            multiply(a[run.span].t(), b[run.span], alpha, output_dtype, out[run.group])
    return out
