"""Dense GEMMs of the reference backend against FP64 on the same operands, decoded by third-party dtypes."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.oracle import decode, sqnr_db, within_bound
from helpers.policies import FLOOR, FORMATS, HIF8, RCEIL, RECIPES, policy

from quaver.backends import CONTRACTED, GemmSite, QuantizationRole, ScalingSpec

Role = QuantizationRole
LAYOUT_OF = {"fprop": "NT", "dgrad": "NN", "wgrad": "TN"}
ROLES_OF = {
    "fprop": (Role.INPUT_FWD, Role.WEIGHT_FWD),
    "dgrad": (Role.GRAD_OUTPUT, Role.WEIGHT_BWD),
    "wgrad": (Role.GRAD_OUTPUT, Role.INPUT_BWD),
}
# (T, K, N): multiples of 32, none of them, single rows, and above and below oneDNN's smallest matrix
SHAPES = [(64, 96, 128), (37, 45, 51), (1, 40, 1), (1, 33, 64), (130, 257, 70), (5, 32, 7)]


def operands(gemm, x, w, g, recipe):
    """(left, right) of one GEMM, quantised along the axis that it contracts."""
    left, right = {"fprop": (x, w), "dgrad": (g, w), "wgrad": (g, x)}[gemm]
    a_side, b_side = CONTRACTED[LAYOUT_OF[gemm]]
    a_role, b_role = ROLES_OF[gemm]
    return (
        recipe.quantizer(a_role).quantize(left, orientation=a_side),
        recipe.quantizer(b_role).quantize(right, orientation=b_side),
    )


def in_fp64(gemm, left, right):
    """The two matrices whose plain product the GEMM is."""
    a, b = decode(left), decode(right)
    return (a.t() if LAYOUT_OF[gemm][0] == "T" else a), (b.t() if LAYOUT_OF[gemm][1] == "T" else b)


def run_gemm(gemm, left, right, recipe, dtype):
    return recipe.backend.low_precision_matmul(
        left, right, layout=LAYOUT_OF[gemm], output_dtype=dtype, site=GemmSite("m", gemm)
    )


def data(T, K, N, *, seed=0, dtype=torch.bfloat16):
    torch.manual_seed(seed)
    return torch.randn(T, K, dtype=dtype), torch.randn(N, K) * 0.02, torch.randn(T, N, dtype=dtype) * 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("gemm", ["fprop", "dgrad", "wgrad"])
@pytest.mark.parametrize("recipe_id", RECIPES)
def test_a_gemm_is_within_one_rounding_and_the_accumulation_of_fp64(recipe_id, gemm, dtype):
    recipe = policy(recipe_id).recipe
    for seed, (T, K, N) in enumerate(SHAPES):
        left, right = operands(gemm, *data(T, K, N, seed=seed, dtype=dtype), recipe)
        y = run_gemm(gemm, left, right, recipe, dtype)
        assert y.dtype is dtype
        a, b = in_fp64(gemm, left, right)
        assert y.shape == (a @ b).shape
        assert within_bound(y, a, b).all(), (T, K, N)


@pytest.mark.parametrize("gemm", ["fprop", "dgrad", "wgrad"])
@pytest.mark.parametrize("recipe_id", FORMATS)
def test_bf16_outputs_are_the_fp32_accumulate_rounded_once(recipe_id, gemm):
    """A scale applied behind the rounding to BF16 would make a quarter of the elements differ."""
    recipe = policy(recipe_id).recipe
    left, right = operands(gemm, *data(256, 320, 192), recipe)
    y = run_gemm(gemm, left, right, recipe, torch.bfloat16)
    a, b = in_fp64(gemm, left, right)
    assert (y == (a @ b).bfloat16()).float().mean() >= 0.999


@pytest.mark.parametrize("gemm", ["fprop", "dgrad", "wgrad"])
@pytest.mark.parametrize("recipe_id", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_empty_inputs(recipe_id, gemm, dtype):
    """No tokens: no rows of y and dx, and a weight gradient of zeros."""
    recipe = policy(recipe_id).recipe
    x, w, g = data(0, 64, 96, dtype=dtype)
    y = run_gemm(gemm, *operands(gemm, x, w, g, recipe), recipe, dtype)
    wanted = {"fprop": torch.zeros(0, 96), "dgrad": torch.zeros(0, 64), "wgrad": torch.zeros(96, 64)}[gemm]
    assert y.dtype is dtype
    assert torch.equal(y.float(), wanted)


# SQNR in dB of one operand on N(0, 1) data: known figures of the two formats
OPERAND_DB = {
    (FLOOR, "input"): 30.65,
    (FLOOR, "gradient"): 30.65,
    (RCEIL, "input"): 31.53,
    (RCEIL, "gradient"): 31.53,
    (HIF8, "input"): 31.57,
    (HIF8, "gradient"): 25.60,
}


@pytest.mark.parametrize("orientation", ["row", "col"])
@pytest.mark.parametrize(("recipe_id", "kind"), list(OPERAND_DB))
def test_sqnr_of_one_operand_is_the_known_figure(recipe_id, kind, orientation):
    torch.manual_seed(3)
    x = torch.randn(512, 1024)
    role = Role.GRAD_OUTPUT if kind == "gradient" else Role.INPUT_FWD
    operand = policy(recipe_id).recipe.quantizer(role).quantize(x, orientation=orientation)
    assert sqnr_db(x, decode(operand)) == pytest.approx(OPERAND_DB[recipe_id, kind], abs=0.3)


@pytest.mark.parametrize("gemm", ["fprop", "dgrad", "wgrad"])
@pytest.mark.parametrize("recipe_id", RECIPES)
def test_sqnr_of_a_gemm_is_the_sum_of_its_operands_noise(recipe_id, gemm):
    """Independent noise adds: 28.5 dB for two HiF8/15 or rceil operands, 27.6 dB for two floor operands."""
    recipe = policy(recipe_id).recipe
    torch.manual_seed(5)
    x, w, g = torch.randn(256, 512), torch.randn(256, 512), torch.randn(256, 256)
    y = run_gemm(gemm, *operands(gemm, x, w, g, recipe), recipe, torch.bfloat16)
    exact = {"fprop": x @ w.t(), "dgrad": g @ w, "wgrad": g.t() @ x}[gemm]
    left = "input" if gemm == "fprop" else "gradient"
    sides = [OPERAND_DB[recipe_id, left], OPERAND_DB[recipe_id, "input"]]
    wanted = -10 * math.log10(sum(10 ** (-side / 10) for side in sides))
    assert sqnr_db(exact, y) == pytest.approx(wanted, abs=0.3)


def test_codecs_are_data_and_an_unknown_format_is_named():
    from quaver.backends import ReferenceBackend
    from quaver.errors import CapabilityError

    backend = ReferenceBackend(codecs={})
    with pytest.raises(CapabilityError, match="mxfp8_e4m3"):
        backend.quantize(
            torch.ones(2, 32), spec=ScalingSpec("mxfp8_e4m3"), role=Role.INPUT_FWD, orientation="row"
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_scales_that_stay_on_a_device_give_the_same_numbers(dtype):
    """There the product of the two scales is a tensor, because reading it would stall the device."""
    from quaver.backends.reference import multiply

    torch.manual_seed(7)
    a, b = torch.randn(40, 64).bfloat16(), torch.randn(64, 48).bfloat16()
    alpha = 0.3 * 1.7e-3
    there = multiply(a, b, torch.tensor(alpha, dtype=torch.float64), dtype)
    here = multiply(a, b, alpha, dtype)
    assert there.dtype is here.dtype is dtype
    for y in (there, here):
        assert within_bound(y, a.double() * alpha, b.double()).all()
    assert (there == here).float().mean() > 0.999
