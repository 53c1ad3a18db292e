"""Non-finite values are never hidden, and blocks outside BF16's normal range lose nothing."""

from __future__ import annotations

import pytest
import torch
from helpers.oracle import decode, within_bound
from helpers.policies import FLOOR, FORMATS, HIF8, policy

from quaver.backends import GemmSite, QuantizationRole

Role = QuantizationRole


def product(x, w, recipe, dtype=torch.bfloat16):
    left = recipe.quantizer(Role.INPUT_FWD).quantize(x, orientation="row")
    right = recipe.quantizer(Role.WEIGHT_FWD).quantize(w, orientation="row")
    y = recipe.backend.low_precision_matmul(
        left, right, layout="NT", output_dtype=dtype, site=GemmSite("m", "fprop")
    )
    return y, left, right


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_mxfp8_a_non_finite_activation_makes_its_row_nan_and_no_other(bad, dtype):
    recipe = policy(FLOOR).recipe
    torch.manual_seed(0)
    x, w = torch.randn(70, 96, dtype=dtype), torch.randn(40, 96)
    clean, *_ = product(x, w, recipe, dtype)
    x[3, 17] = bad
    x[64, 95] = bad
    y, *_ = product(x, w, recipe, dtype)
    rows = torch.zeros(70, dtype=torch.bool)
    rows[[3, 64]] = True
    assert y[rows].isnan().all()
    # the whole operand takes the FP32 path, so the last BF16 bit of other rows may move
    assert torch.isfinite(y[~rows]).all()
    torch.testing.assert_close(y[~rows], clean[~rows], rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_hif8_non_finite_codes_propagate(dtype):
    """NaN stays NaN; Inf has a code of its own, so Inf times a nonzero weight is Inf."""
    recipe = policy(HIF8).recipe
    x, w = torch.ones(4, 64, dtype=dtype), torch.ones(32, 64)
    x[1, 5], x[2, 6], x[3, 7] = float("nan"), float("inf"), float("-inf")
    y, left, _ = product(x, w, recipe, dtype)
    assert left.data[1, 5] == 0x80
    assert left.data[2, 6] == 0x6F
    assert left.data[3, 7] == 0xEF
    assert torch.equal(y[0].float(), torch.full((32,), 64.0))
    assert y[1].isnan().all()
    assert (y[2] == float("inf")).all()
    assert (y[3] == float("-inf")).all()


@pytest.mark.parametrize("recipe_id", FORMATS)
def test_a_non_finite_gradient_reaches_both_gradients(recipe_id):
    """dx of its token is non-finite in every element, and so is dw of its output feature."""
    recipe = policy(recipe_id).recipe
    torch.manual_seed(1)
    g, w, x = torch.randn(64, 96).bfloat16(), torch.randn(96, 32), torch.randn(64, 32).bfloat16()
    g[10, 20] = float("nan")
    g_row, g_col = recipe.quantizer(Role.GRAD_OUTPUT).quantize_dual(g)
    w_col = recipe.quantizer(Role.WEIGHT_BWD).quantize(w, orientation="col")
    x_col = recipe.quantizer(Role.INPUT_BWD).quantize(x, orientation="col")
    matmul = recipe.backend.low_precision_matmul
    dx = matmul(g_row, w_col, layout="NN", output_dtype=torch.bfloat16, site=GemmSite("m", "dgrad"))
    dw = matmul(g_col, x_col, layout="TN", output_dtype=torch.bfloat16, site=GemmSite("m", "wgrad"))
    assert dx.isnan().any(1).nonzero().flatten().tolist() == [10]
    assert dx[10].isnan().all()
    assert dw.isnan().any(1).nonzero().flatten().tolist() == [20]
    assert dw[20].isnan().all()


@pytest.mark.parametrize("exponent", [-135, -133, -126, -120, -118, -112, -109])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_tiny_blocks_are_exact(exponent, dtype):
    """Blocks whose values are BF16 subnormals, or FP32 ones, against FP64; the other operand is large."""
    recipe = policy(FLOOR).recipe
    torch.manual_seed(2)
    x = (torch.randn(48, 64) * 2.0**exponent).to(dtype)
    w = torch.randn(64, 64) * 2.0**40
    y, left, right = product(x, w, recipe, dtype)
    assert int(left.scale.max()) < 40
    a, b = decode(left), decode(right).t()
    assert within_bound(y, a, b).all()
    assert (y != 0).any()


def test_one_tiny_block_beside_ordinary_ones_loses_nothing():
    """Only the tiny block meets nonzero weights, so that losing it would show in every output."""
    recipe = policy(FLOOR).recipe
    torch.manual_seed(4)
    x = torch.randn(64, 64).bfloat16()
    x[:, :32] *= 2.0**-124
    w = torch.randn(64, 64) * 2.0**60
    w[:, 32:] = 0
    y, left, right = product(x, w, recipe)
    a, b = decode(left), decode(right).t()
    assert (left.scale[:, 0] < 10).all()
    assert (left.scale[:, 1] > 100).all()
    assert within_bound(y, a, b).all()
    assert (y != 0).all()


@pytest.mark.parametrize("orientation", ["row", "col"])
@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (0.0, torch.bfloat16),  # a zero block has scale byte 0 and loses nothing
        (2.0**-109, torch.bfloat16),  # byte 10, the first whose smallest value is a normal BF16
        (2.0**-110, torch.float32),  # byte 9
        (2.0**-119, torch.float32),  # byte 0 on a nonzero block
        (2.0**127, torch.bfloat16),  # byte 246, the largest finite block
        (float("inf"), torch.float32),  # byte 255
    ],
)
def test_which_blocks_need_fp32(value, dtype, orientation):
    """Zero blocks do not force the FP32 path, a single subnormal or non-finite block does."""
    recipe = policy(FLOOR).recipe
    x = torch.ones(64, 64)
    x[:32, :32] = 0.0
    x[0, 0] = value
    x[1, 0] = value * 2.0**-16  # a code of its own, and a BF16 subnormal for the tiny blocks
    x[0, 1] = value * 2.0**-16
    operand = recipe.quantizer(Role.INPUT_FWD).quantize(x, orientation=orientation)
    factors = recipe.backend.codec("mxfp8_e4m3").factors(operand, torch.bfloat16)
    assert factors.values.dtype is dtype
    assert torch.equal(factors.values.double().nan_to_num(7), decode(operand).nan_to_num(7))


def test_the_fp32_path_survives_autocast():
    """Autocast would round the FP32 factors, and the output, to BF16."""
    recipe = policy(FLOOR).recipe
    torch.manual_seed(6)
    x, w = torch.randn(64, 64) * 2.0**-125, torch.randn(64, 64) * 2.0**60
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, left, right = product(x, w, recipe, torch.float32)
    assert y.dtype is torch.float32
    assert within_bound(y, decode(left), decode(right).t()).all()
