"""Operands that cannot enter a GEMM are refused by name: FQN and GEMM are in every message."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from helpers.policies import FLOOR, FORMATS, HIF8, policy

from quaver.backends import GemmSite, OperandError, QuantizationRole, QuantizedOperand
from quaver.low_precision import low_precision_grouped_matmul, low_precision_matmul

Role = QuantizationRole
SITE = GemmSite("model.layers.0.mlp.up_proj", "fprop")
ENDS = torch.tensor([2, 2, 6])


def operand(recipe_id, *shape, orientation="row", role=Role.INPUT_FWD, ends=None):
    torch.manual_seed(0)
    quantizer = policy(recipe_id).recipe.quantizer(role)
    return quantizer.quantize(torch.randn(*shape), orientation=orientation, group_list=ends)


def dense(left, right, layout="NT", dtype=torch.bfloat16):
    return low_precision_matmul(left, right, layout=layout, output_dtype=dtype, site=SITE)


def grouped(left, right, ends=ENDS, layout="NN", dtype=torch.bfloat16):
    return low_precision_grouped_matmul(left, right, ends, layout=layout, output_dtype=dtype, site=SITE)


def refused(words):
    return pytest.raises(OperandError, match=rf"(?s){words}.*model\.layers\.0\.mlp\.up_proj fprop")


@pytest.mark.parametrize("recipe_id", FORMATS)
def test_what_fits_passes(recipe_id):
    assert dense(operand(recipe_id, 6, 64), operand(recipe_id, 8, 64)).shape == (6, 8)
    weight = operand(recipe_id, 3, 64, 8, orientation="col")
    assert grouped(operand(recipe_id, 6, 64), weight).shape == (6, 8)


@pytest.mark.parametrize("recipe_id", FORMATS)
@pytest.mark.parametrize("layout", ["NN", "NT", "TN"])
def test_orientation(recipe_id, layout):
    """Of the four pairs of orientations exactly one fits a layout."""
    wanted = {"NN": ("row", "col"), "NT": ("row", "row"), "TN": ("col", "col")}[layout]
    for pair in itertools.product(("row", "col"), repeat=2):
        left, right = (operand(recipe_id, 64, 64, orientation=side) for side in pair)
        if pair == wanted:
            assert dense(left, right, layout).shape == (64, 64)
        else:
            with refused("contraction"):
                dense(left, right, layout)


def test_layout():
    x = operand(FLOOR, 64, 64)
    with refused("layout 'TT'"):
        dense(x, x, "TT")


def test_two_formats():
    with refused("two formats, mxfp8_e4m3 and hif8"):
        dense(operand(FLOOR, 6, 64), operand(HIF8, 8, 64))


@pytest.mark.parametrize("recipe_id", FORMATS)
def test_shapes(recipe_id):
    x, w3 = operand(recipe_id, 6, 64), operand(recipe_id, 3, 64, 8, orientation="col")
    with refused("contracted lengths 64 and 96"):
        dense(x, operand(recipe_id, 8, 96))
    with refused("contracted lengths 64 and 96"):
        grouped(x, operand(recipe_id, 3, 96, 8, orientation="col"))
    with refused("contracted lengths 6 and 7"):
        left, right = (operand(recipe_id, tokens, 64, orientation="col") for tokens in (6, 7))
        dense(left, right, "TN")
    with refused("wanted 2-D and 2-D"):
        dense(x, replace(w3, orientation="row"))
    with refused("wanted 2-D and 3-D"):
        grouped(x, operand(recipe_id, 64, 8, orientation="col"))
    with refused("wanted 2-D and 2-D"):
        grouped(operand(recipe_id, 6, 64, orientation="col"), w3, layout="TN")


@pytest.mark.parametrize("recipe_id", FORMATS)
@pytest.mark.parametrize(
    ("ends", "words"),
    [
        (torch.tensor([2, 2, 6], dtype=torch.int32), "torch.int32"),
        (torch.tensor([[2, 2, 6]]), "int64 \\[E\\]"),
        (torch.tensor([2, 6]), "2 groups, the weight 3"),
        (torch.tensor([2, 2, 5]), "does not ascend to the 6 rows"),
        (torch.tensor([4, 2, 6]), "does not ascend"),
        (torch.tensor([-1, 2, 6]), "does not ascend"),
    ],
)
def test_group_list(recipe_id, ends, words):
    weight = operand(recipe_id, 3, 64, 8, orientation="col")
    with refused(words):
        grouped(operand(recipe_id, 6, 64), weight, ends)


@pytest.mark.parametrize("recipe_id", FORMATS)
def test_group_list_of_a_weight_gradient(recipe_id):
    g = operand(recipe_id, 6, 96, orientation="col", ends=ENDS)
    x = operand(recipe_id, 6, 64, orientation="col", ends=ENDS)
    assert grouped(g, x, layout="TN").shape == (3, 96, 64)
    for bad in (torch.tensor([2, 2, 5]), torch.tensor([], dtype=torch.int64)):
        with refused("does not ascend"):
            grouped(g, x, bad, layout="TN")


def test_scales_of_other_groups_are_refused():
    """Blocks of the token axis restart at each group: scales for one split do not serve another."""
    g = operand(FLOOR, 64, 96, orientation="col", ends=torch.tensor([40, 64]))
    x = operand(FLOOR, 64, 64, orientation="col", ends=torch.tensor([40, 64]))
    with refused("col scale of .64, 96. codes is torch.uint8 .3, 96."):
        grouped(g, x, torch.tensor([32, 64]), layout="TN")


@pytest.mark.parametrize("recipe_id", FORMATS)
def test_scale_dtype_and_shape(recipe_id):
    x, w = operand(recipe_id, 6, 64), operand(recipe_id, 8, 64)
    for scale in (x.scale.double(), torch.ones(3, 2, dtype=x.scale.dtype)):
        with refused("row scale of .6, 64. codes"):
            dense(replace(x, scale=scale), w)
        with refused("row scale of .8, 64. codes"):
            dense(x, replace(w, scale=scale))


def test_one_scale_per_expert_is_for_three_dimensions():
    x, w = operand(HIF8, 6, 64), operand(HIF8, 8, 64)
    with refused("float32 .8,., hif8 wants torch.float32 ()"):
        dense(x, replace(w, scale=torch.ones(8)))
    weight = operand(HIF8, 3, 64, 8, orientation="col")
    assert weight.scale.shape == (3,)
    with refused("wants torch.float32 .. or .3,."):
        grouped(x, replace(weight, scale=torch.ones(2)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.uint8])
def test_output_dtype(dtype):
    with refused(f"output dtype {dtype}"):
        dense(operand(FLOOR, 6, 64), operand(FLOOR, 8, 64), dtype=dtype)
    with refused(f"output dtype {dtype}"):
        grouped(operand(FLOOR, 6, 64), operand(FLOOR, 3, 64, 8, orientation="col"), dtype=dtype)


def test_what_is_no_operand_at_all():
    codes = torch.zeros(4, 32, dtype=torch.uint8)
    good = QuantizedOperand(codes, torch.zeros(4, 1, dtype=torch.uint8), torch.bfloat16, "mxfp8_e4m3", "row")
    with pytest.raises(OperandError, match="neither row nor col"):
        replace(good, orientation="diagonal")
    with pytest.raises(OperandError, match=r"codes are torch\.uint8"):
        replace(good, data=codes.to(torch.int16))
    with pytest.raises(OperandError, match="2-D or 3-D"):
        replace(good, data=codes[0])
    with pytest.raises(OperandError, match="scales have an axis"):
        good.as_orientation("col")
    with pytest.raises(OperandError, match=r"'forward' is not one of fprop, dgrad, wgrad"):
        GemmSite("m", "forward")


def test_a_refused_gemm_is_not_in_the_ledger():
    bound = policy(FLOOR)
    x = operand(FLOOR, 6, 64)
    with refused("contracted"):
        bound.backend.low_precision_matmul(
            x, operand(FLOOR, 8, 96), layout="NT", output_dtype=torch.bfloat16, site=SITE
        )
    assert not bound.backend.ledger.executed
