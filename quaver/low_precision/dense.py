"""The dense layer's three GEMMs, each on quantised operands: fprop, dgrad, wgrad.

    y_TN  = x_TK(row) . w_NK(row)^T      contracts K
    dx_TK = g_TN(row) . w_NK(col)        contracts N
    dw_NK = g_TN(col)^T . x_TK(col)      contracts the tokens T

x is quantised both ways in one read during the forward pass; what autograd saves is its eight-bit `col` form and
the weight *object*, whose physical tensors a later gather may swap. May import: backends, recipe, quantized,
master.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from quaver.backends import GemmSite, QuantizationRole, QuantizedOperand
from quaver.backends.native import widened
from quaver.errors import StaleWeightError
from quaver.low_precision.master import MasterWeight
from quaver.low_precision.quantized import QuantizedWeightTensor
from quaver.low_precision.recipe import LowPrecisionRecipe

Role = QuantizationRole
Weight = MasterWeight | QuantizedWeightTensor


def check_version(weight: Weight, version: int) -> None:
    """StaleWeightError if the weight was refreshed between a forward pass and its backward."""
    if weight.version != version:
        raise StaleWeightError(
            "the weight was refreshed between forward and backward: its gradient would mix two weights",
            where=weight.spec.fqn,
            remedy="call optimizer.step() and quaver.refresh(model) only after every backward of the step",
        )


class _DenseGemms(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TK: torch.Tensor, w_NK: Weight, fqn: str, recipe: LowPrecisionRecipe, wants_wgrad: bool
    ) -> torch.Tensor:
        if wants_wgrad:
            row, col = recipe.quantize_pair(x_TK, Role.INPUT_FWD, Role.INPUT_BWD, fqn=fqn)
            ctx.save_for_backward(col.data, col.scale, w_NK)
        else:
            row = recipe.quantizer(Role.INPUT_FWD, fqn).quantize(x_TK, orientation="row")
            ctx.save_for_backward(w_NK)
        ctx.fqn, ctx.recipe, ctx.version, ctx.x_dtype = fqn, recipe, w_NK.version, x_TK.dtype
        return recipe.backend.low_precision_matmul(
            row, w_NK.select("row"), layout="NT", output_dtype=x_TK.dtype, site=GemmSite(fqn, "fprop")
        )

    @staticmethod
    @once_differentiable  # a second derivative through codes would be zero without a word
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (g_TN,) = grads
        *saved, w_NK = ctx.saved_tensors
        recipe: LowPrecisionRecipe = ctx.recipe
        wants_dgrad, wants_wgrad = ctx.needs_input_grad[:2]
        check_version(w_NK, ctx.version)
        g_row, g_col = recipe.quantizer(Role.GRAD_OUTPUT, ctx.fqn).quantize_sides(
            g_TN, row=wants_dgrad, col=wants_wgrad
        )
        dx_TK = dw_NK = None
        matmul = recipe.backend.low_precision_matmul
        if g_row is not None:
            site = GemmSite(ctx.fqn, "dgrad")
            dx_TK = matmul(g_row, w_NK.select("col"), layout="NN", output_dtype=ctx.x_dtype, site=site)
        if g_col is not None:
            x_col = QuantizedOperand(saved[0], saved[1], ctx.x_dtype, recipe.format, "col")
            site = GemmSite(ctx.fqn, "wgrad")
            product = matmul(g_col, x_col, layout="TN", output_dtype=ctx.x_dtype, site=site)
            dw_NK = widened(product, w_NK.dtype)
        return dx_TK, dw_NK, None, None, None


def low_precision_linear(
    x: torch.Tensor, weight: Weight, *, fqn: str, recipe: LowPrecisionRecipe
) -> torch.Tensor:
    """y = x w^T with all three GEMMs in eight bits.

    Args:
        x: [..., K], BF16 or FP32; any leading shape.
        weight: [N, K], at rest or in flight.
        fqn: the module's FQN, for the ledger and for errors.
        recipe: formats, scaling and backend.

    Returns:
        [..., N] in x's dtype.
    """
    ledger = recipe.backend.ledger
    grads = torch.is_grad_enabled()
    wants_wgrad = grads and weight.requires_grad  # under no_grad torch still says that the weight needs one
    ledger.announce(fqn, input_grad=grads and x.requires_grad, weight_grad=wants_wgrad)
    y = _DenseGemms.apply(x.reshape(-1, x.shape[-1]), weight, fqn, recipe, wants_wgrad)
    return y.view(*x.shape[:-1], weight.shape[0])
