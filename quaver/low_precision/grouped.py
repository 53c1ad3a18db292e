"""The experts' SwiGLU as one autograd node over tokens sorted by expert, every GEMM on quantised operands.

    h_S2F = x_SH(row)   . gate_up[E,H,2F](col)     act_SF = silu(gate) * up
    y_SH  = act_SF(row) . down[E,F,H](col)         out_TH = sum_k weight_Tk * y

S = T * k rows, one per token and chosen expert, sorted by expert; `ends` are the groups' cumulative ends. Row
quantisation is per token, so x is quantised once before the rows are copied k times, unless a kernel that gathers
makes both directions in one pass; `col` blocks run along the rows and restart at each expert. Weights are seen as the
grouped GEMM sees them, [E, K, N], and stored [E, N, K].
Knows nothing of any model. May import: backends, recipe, dense (version check).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch.autograd.function import once_differentiable

from quaver.backends import GemmSite, OperandError, QuantizationRole, QuantizedOperand, UncodedOperand
from quaver.backends.native import experts, usable, widened
from quaver.backends.sources import GatheredRows, RowSource, ScaledRows, SwiGLU, SwiGLUGradient
from quaver.low_precision.dense import Weight, check_version
from quaver.low_precision.recipe import LowPrecisionRecipe

Role = QuantizationRole


@dataclass(frozen=True)
class Routing:
    """Which rows go to which expert.

    Args:
        order_S: flat (token, choice) indices sorted by expert, stable.
        inverse_S: where each flat (token, choice) went.
        token_S: the token of each sorted row.
        ends_E: int64 cumulative ends of the groups.
        counts: rows per expert.
    """

    order_S: torch.Tensor
    inverse_S: torch.Tensor
    token_S: torch.Tensor
    ends_E: torch.Tensor
    counts: list[int]


def route(index_Tk: torch.Tensor, experts: int, fqn: str) -> Routing:
    """Sorts (token, choice) pairs by expert; OperandError if an index names no expert."""
    flat = index_Tk.reshape(-1)
    if flat.numel():
        lowest, highest = (int(v) for v in torch.aminmax(flat))
        if lowest < 0 or highest >= experts:
            wrong = lowest if lowest < 0 else highest
            raise OperandError(f"expert index {wrong} is none of the experts 0..{experts - 1}", where=fqn)
    counts = torch.bincount(flat, minlength=experts)
    order = torch.argsort(flat, stable=True)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel(), device=order.device)
    return Routing(order, inverse, order // index_Tk.shape[1], counts.cumsum(0), counts.tolist())


def _check_shapes(
    x_TH: torch.Tensor,
    index_Tk: torch.Tensor,
    weight_Tk: torch.Tensor,
    gate_up: Weight,
    down: Weight,
    sites: tuple[str, str],
) -> None:
    """OperandError unless tokens, choices, combine weights and the two expert weights fit each other."""
    if index_Tk.dtype not in (torch.int64, torch.int32):
        raise OperandError(f"expert indices are {index_Tk.dtype}, wanted int64", where=sites[0])
    if index_Tk.ndim != 2 or index_Tk.shape != weight_Tk.shape or x_TH.shape[:-1] != index_Tk.shape[:1]:
        raise OperandError(
            f"tokens {tuple(x_TH.shape)}, expert indices {tuple(index_Tk.shape)} and combine weights"
            f" {tuple(weight_Tk.shape)}, wanted [T, H], [T, k] and [T, k]",
            where=sites[0],
        )
    experts, twice, hidden = gate_up.shape
    if x_TH.shape[1] != hidden:
        raise OperandError(f"tokens {tuple(x_TH.shape)}, wanted [T, {hidden}]", where=sites[0])
    if tuple(down.shape) != (experts, hidden, twice // 2) or twice % 2:
        raise OperandError(
            f"down {tuple(down.shape)} does not fit gate_up {tuple(gate_up.shape)} = [E, 2F, H]",
            where=sites[1],
        )


def _rows(operand: QuantizedOperand, index_S: torch.Tensor) -> QuantizedOperand:
    """Rows of a row-quantised operand, copied as codes and values; a per-tensor scale has no rows."""
    scale = operand.scale if operand.scale.ndim == 0 else operand.scale.index_select(0, index_S)
    values = None if operand.values is None else operand.values.index_select(0, index_S)
    if values is not None and isinstance(operand, UncodedOperand):
        codes = partial(_picked, operand, index_S)
        return UncodedOperand(codes, scale, operand.logical_dtype, operand.format, "row", values)
    return replace(operand, data=operand.data.index_select(0, index_S), scale=scale, values=values)


def _picked(operand: QuantizedOperand, index_S: torch.Tensor) -> torch.Tensor:
    return operand.data.index_select(0, index_S)


def _quantized_rows(
    x_TH: torch.Tensor, routing: Routing, recipe: LowPrecisionRecipe, site: str, wants_col: bool
) -> tuple[QuantizedOperand, QuantizedOperand | None]:
    """x as the experts see it: by row, and by col where a weight's gradient will want it.

    Kernels give blocks of both directions while they gather, in less time than two passes for every k from 1 to 8.
    Otherwise rows are quantised before they are copied k times; and one scale without an axis makes the codes serve
    the token axis too.
    """
    ends, quantizer = routing.ends_E, recipe.quantizer(Role.INPUT_FWD, site)
    x_SH = GatheredRows(x_TH, routing.token_S)
    if wants_col and quantizer.spec.block is not None and _takes_sources(recipe) and usable(x_TH):
        return recipe.quantize_pair(_for(recipe, x_SH), Role.INPUT_FWD, Role.INPUT_BWD, ends, site)
    row = _rows(quantizer.quantize(x_TH, orientation="row"), routing.token_S)
    if not wants_col:
        return row, None
    if row.scale.ndim == 0:
        return row, row.as_orientation("col")
    quantizer = recipe.quantizer(Role.INPUT_BWD, site)
    return row, quantizer.quantize(_for(recipe, x_SH), orientation="col", group_list=ends)


def _takes_sources(recipe: LowPrecisionRecipe) -> bool:
    return bool(getattr(recipe.backend, "takes_sources", False))


def _for(recipe: LowPrecisionRecipe, source: RowSource) -> torch.Tensor:
    """What the recipe's backend quantises: the source itself where it takes one, else its tensor."""
    if _takes_sources(recipe):
        return cast(torch.Tensor, source)
    return source.tensor()


def _combine(y_SH: torch.Tensor, place_Tk: torch.Tensor, weight_Tk: torch.Tensor | None) -> torch.Tensor:
    """The k branches of each token, weighted where there are weights, summed in FP32 and rounded once."""
    weight = None if weight_Tk is None else weight_Tk.float().contiguous()
    found = experts.combine(y_SH, place_Tk, weight)
    if found is not None:
        return found
    chosen = y_SH.index_select(0, place_Tk.reshape(-1)).view(*place_Tk.shape, y_SH.shape[1]).float()
    return (chosen if weight is None else chosen * weight.unsqueeze(-1)).sum(1).to(y_SH.dtype)


def _dots(y_SH: torch.Tensor, place_Tk: torch.Tensor, g_TH: torch.Tensor) -> torch.Tensor:
    """FP32 [T, k]: each branch times the gradient of its token's sum."""
    found = experts.dots(y_SH, place_Tk, g_TH)
    if found is not None:
        return found
    chosen = y_SH.index_select(0, place_Tk.reshape(-1)).view(*place_Tk.shape, y_SH.shape[1])
    return (chosen.float() * g_TH.float().unsqueeze(1)).sum(-1)


def _tensors(operand: QuantizedOperand | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """What autograd saves of an operand."""
    return (None, None) if operand is None else (operand.data, operand.scale)


class _GroupedSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TH: torch.Tensor,
        weight_Tk: torch.Tensor,
        routing: Routing,
        gate_up: Weight,
        down: Weight,
        sites: tuple[str, str],
        recipe: LowPrecisionRecipe,
        wants_wgrad: tuple[bool, bool],
    ) -> torch.Tensor:
        gmm, dtype, ends = recipe.backend.low_precision_grouped_matmul, x_TH.dtype, routing.ends_E
        x_row, x_col = _quantized_rows(x_TH, routing, recipe, sites[0], wants_wgrad[0])
        site = GemmSite(sites[0], "fprop")
        h = gmm(x_row, gate_up.select("col"), ends, layout="NN", output_dtype=dtype, site=site)
        act = _for(recipe, SwiGLU(h))
        a_col = None
        if wants_wgrad[1]:
            a_row, a_col = recipe.quantize_pair(act, Role.INPUT_FWD, Role.INPUT_BWD, ends, sites[1])
        else:
            a_row = recipe.quantizer(Role.INPUT_FWD, sites[1]).quantize(act, orientation="row")
        site = GemmSite(sites[1], "fprop")
        y = gmm(a_row, down.select("col"), ends, layout="NN", output_dtype=dtype, site=site)
        saved = [t for operand in (x_col, a_col) for t in _tensors(operand)]
        ctx.save_for_backward(
            *saved, h, y, weight_Tk, routing.order_S, routing.inverse_S, routing.token_S, ends, gate_up, down
        )
        ctx.sites, ctx.recipe, ctx.versions = sites, recipe, (gate_up.version, down.version)
        return _combine(y, routing.inverse_S.view(weight_Tk.shape), weight_Tk)

    @staticmethod
    @once_differentiable  # a second derivative through codes would be zero without a word
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        (g_TH,) = grads
        (xc, xs, ac, as_, h, y, weight_Tk, order, inverse, token, ends, gate_up, down) = ctx.saved_tensors
        check_version(gate_up, ctx.versions[0])
        check_version(down, ctx.versions[1])
        recipe: LowPrecisionRecipe = ctx.recipe
        gmm, dtype, fmt = recipe.backend.low_precision_grouped_matmul, g_TH.dtype, recipe.format
        gradient = recipe.quantizer(Role.GRAD_OUTPUT, ctx.sites[0].rpartition(".")[0] or ctx.sites[0])
        wants_x, wants_weight, _, wants_gate_up, wants_down = ctx.needs_input_grad[:5]
        place_Tk = inverse.view(weight_Tk.shape)
        dx = dweight = dgate_up = ddown = None
        if wants_weight:
            dweight = _dots(y, place_Tk, g_TH).to(weight_Tk.dtype)
        gy = _for(recipe, ScaledRows(g_TH, token, weight_Tk.reshape(-1)[order].float()))
        gy_row, gy_col = gradient.quantize_sides(
            gy, row=wants_x or wants_gate_up, col=wants_down, group_list=ends
        )
        if gy_col is not None:
            a_col = QuantizedOperand(ac, as_, dtype, fmt, "col")
            site = GemmSite(ctx.sites[1], "wgrad")
            ddown = gmm(gy_col, a_col, ends, layout="TN", output_dtype=dtype, site=site)
            ddown = widened(ddown, down.dtype)
        if gy_row is not None:
            site = GemmSite(ctx.sites[1], "dgrad")
            da = gmm(gy_row, down.select("row"), ends, layout="NT", output_dtype=dtype, site=site)
            dh = _for(recipe, SwiGLUGradient(da, h))
            gh_row, gh_col = gradient.quantize_sides(dh, row=wants_x, col=wants_gate_up, group_list=ends)
            if gh_col is not None:
                x_col, site = QuantizedOperand(xc, xs, dtype, fmt, "col"), GemmSite(ctx.sites[0], "wgrad")
                dgate_up = gmm(gh_col, x_col, ends, layout="TN", output_dtype=dtype, site=site)
                dgate_up = widened(dgate_up, gate_up.dtype)
            if gh_row is not None:
                site = GemmSite(ctx.sites[0], "dgrad")
                dx_S = gmm(gh_row, gate_up.select("row"), ends, layout="NT", output_dtype=dtype, site=site)
                dx = _combine(dx_S, place_Tk, None)
        return dx, dweight, None, dgate_up, ddown, None, None, None


def low_precision_grouped_swiglu(
    x_TH: torch.Tensor,
    index_Tk: torch.Tensor,
    weight_Tk: torch.Tensor,
    gate_up: Weight,
    down: Weight,
    *,
    sites: tuple[str, str],
    recipe: LowPrecisionRecipe,
) -> torch.Tensor:
    """sum_k weight_Tk * SwiGLU_expert(x), all six GEMMs in eight bits.

    Args:
        x_TH: [T, H] tokens, BF16 or FP32.
        index_Tk: [T, k] expert of each choice, int64.
        weight_Tk: [T, k] combine weights, FP32; they get a gradient.
        gate_up: [E, 2F, H], gate first; down: [E, H, F].
        sites: FQNs of the two parameters, for the ledger and for errors.
        recipe: formats, scaling and backend.

    Returns:
        [T, H] in x's dtype.
    """
    ledger, grads = recipe.backend.ledger, torch.is_grad_enabled()
    _check_shapes(x_TH, index_Tk, weight_Tk, gate_up, down, sites)
    routing = route(index_Tk, gate_up.shape[0], sites[0])
    x_grad = grads and x_TH.requires_grad
    wants_wgrad = (grads and gate_up.requires_grad, grads and down.requires_grad)
    ledger.announce(sites[0], input_grad=x_grad, weight_grad=wants_wgrad[0])
    ledger.announce(sites[1], input_grad=x_grad or wants_wgrad[0], weight_grad=wants_wgrad[1])
    ledger.note_expert_tokens(sites[0].rpartition(".")[0] or sites[0], routing.counts)
    return _GroupedSwiGLU.apply(x_TH, weight_Tk, routing, gate_up, down, sites, recipe, wants_wgrad)
