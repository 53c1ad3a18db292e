"""Grouped GEMMs of the reference backend against FP64, group by group, on operands decoded independently."""

from __future__ import annotations

import pytest
import torch
from helpers.oracle import decode, within_bound
from helpers.policies import RECIPES, policy

from quaver.backends import GemmSite, QuantizationRole

Role = QuantizationRole
COUNTS = [0, 1, 31, 32, 33, 0, 64, 0]
ALL_TO_ONE, NOTHING, EVEN = [0, 0, 97, 0], [0, 0, 0], [32, 64, 32]


def ends_of(counts):
    return torch.tensor(counts).cumsum(0)


def spans(counts):
    stops = ends_of(counts).tolist()
    return list(zip([0, *stops], stops))


def gemm(layout, left, right, counts, recipe, dtype):
    name = {"NN": "fprop", "NT": "dgrad", "TN": "wgrad"}[layout]
    return recipe.backend.low_precision_grouped_matmul(
        left, right, ends_of(counts), layout=layout, output_dtype=dtype, site=GemmSite("experts.w", name)
    )


def tokens(counts, width, dtype, seed):
    torch.manual_seed(seed)
    return torch.randn(sum(counts), width).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("counts", [COUNTS, ALL_TO_ONE, NOTHING, EVEN], ids=str)
@pytest.mark.parametrize(("K", "N"), [(64, 96), (45, 70)])
@pytest.mark.parametrize("recipe_id", RECIPES)
def test_fprop_and_dgrad_are_one_gemm_an_expert(recipe_id, K, N, counts, dtype):
    """[S,K] x [E,K,N] -> [S,N] and back; experts of very different size keep scales of their own."""
    recipe = policy(recipe_id).recipe
    x, g = tokens(counts, K, dtype, 0), tokens(counts, N, dtype, 1)
    w = torch.randn(len(counts), K, N) * torch.logspace(-3, 1, len(counts)).view(-1, 1, 1)
    x_row = recipe.quantizer(Role.INPUT_FWD).quantize(x, orientation="row")
    g_row = recipe.quantizer(Role.GRAD_OUTPUT).quantize(g, orientation="row")
    w_col = recipe.quantizer(Role.WEIGHT_FWD).quantize(w, orientation="col")
    w_row = recipe.quantizer(Role.WEIGHT_BWD).quantize(w, orientation="row")
    y = gemm("NN", x_row, w_col, counts, recipe, dtype)
    dx = gemm("NT", g_row, w_row, counts, recipe, dtype)
    assert (y.shape, y.dtype) == ((sum(counts), N), dtype)
    assert (dx.shape, dx.dtype) == ((sum(counts), K), dtype)
    x64, g64, wc64, wr64 = decode(x_row), decode(g_row), decode(w_col), decode(w_row)
    for expert, (start, end) in enumerate(spans(counts)):
        assert within_bound(y[start:end], x64[start:end], wc64[expert]).all()
        assert within_bound(dx[start:end], g64[start:end], wr64[expert].t()).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("counts", [COUNTS, ALL_TO_ONE, NOTHING, EVEN], ids=str)
@pytest.mark.parametrize(("K", "N"), [(64, 96), (45, 70)])
@pytest.mark.parametrize("recipe_id", RECIPES)
def test_wgrad_contracts_each_experts_tokens_alone(recipe_id, K, N, counts, dtype):
    """[S,N]^T x [S,K] -> [E,N,K]; an expert without tokens gets exact zeros."""
    recipe = policy(recipe_id).recipe
    g, x = tokens(counts, N, dtype, 2) * 1e-3, tokens(counts, K, dtype, 3)
    ends = ends_of(counts)
    g_col = recipe.quantizer(Role.GRAD_OUTPUT).quantize(g, orientation="col", group_list=ends)
    x_col = recipe.quantizer(Role.INPUT_BWD).quantize(x, orientation="col", group_list=ends)
    dw = gemm("TN", g_col, x_col, counts, recipe, dtype)
    assert (dw.shape, dw.dtype) == ((len(counts), N, K), dtype)
    g64, x64 = decode(g_col, ends.tolist()), decode(x_col, ends.tolist())
    for expert, (start, end) in enumerate(spans(counts)):
        if start == end:
            assert torch.equal(dw[expert], torch.zeros(N, K, dtype=dtype))
        else:
            assert within_bound(dw[expert], g64[start:end].t(), x64[start:end]).all()


def test_a_groups_codes_do_not_depend_on_its_neighbours():
    """Blocks of the token axis restart at each group: quantising a group alone gives the same codes and scales."""
    recipe = policy(RECIPES[0]).recipe
    x, ends = tokens(COUNTS, 40, torch.bfloat16, 4), ends_of(COUNTS)
    x[ends[2] : ends[3]] *= 1000  # a neighbour's large values must not leak into a shared block
    quantizer = recipe.quantizer(Role.INPUT_BWD)
    whole = quantizer.quantize(x, orientation="col", group_list=ends)
    scale_row = 0
    for start, end in spans(COUNTS):
        alone = quantizer.quantize(x[start:end], orientation="col")
        rows = alone.scale.shape[0]
        assert torch.equal(whole.data[start:end], alone.data)
        assert torch.equal(whole.scale[scale_row : scale_row + rows], alone.scale)
        scale_row += rows
    assert scale_row == whole.scale.shape[0] == 0 + 1 + 1 + 1 + 2 + 0 + 2 + 0


@pytest.mark.parametrize("recipe_id", RECIPES)
def test_one_group_is_the_dense_gemm(recipe_id):
    """Bit for bit, all three."""
    recipe = policy(recipe_id).recipe
    torch.manual_seed(5)
    x, w, g = torch.randn(70, 64).bfloat16(), torch.randn(96, 64), torch.randn(70, 96).bfloat16()
    row, col = (recipe.quantizer(Role.INPUT_FWD).quantize(x, orientation=side) for side in ("row", "col"))
    g_row, g_col = recipe.quantizer(Role.GRAD_OUTPUT).quantize_dual(g)
    w_row, w_col = recipe.quantizer(Role.WEIGHT_FWD).quantize_dual(w)
    seen = recipe.quantizer(
        Role.WEIGHT_FWD
    )  # [1, K, N] as the grouped GEMM sees it: blocks along K, then along N
    gw_col, gw_row = (seen.quantize(w.t()[None], orientation=side) for side in ("col", "row"))

    def dense(layout, a, b):
        name = {"NN": "dgrad", "NT": "fprop", "TN": "wgrad"}[layout]
        return recipe.backend.low_precision_matmul(
            a, b, layout=layout, output_dtype=torch.bfloat16, site=GemmSite("m", name)
        )

    for got, wanted in [
        (gemm("NN", row, gw_col, [70], recipe, torch.bfloat16), dense("NT", row, w_row)),
        (gemm("NT", g_row, gw_row, [70], recipe, torch.bfloat16), dense("NN", g_row, w_col)),
        (gemm("TN", g_col, col, [70], recipe, torch.bfloat16)[0], dense("TN", g_col, col)),
    ]:
        assert torch.equal(got, wanted)
