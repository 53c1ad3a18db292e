"""In flight a weight is codes and scales under a BF16 face: no op computes with them."""

from __future__ import annotations

import pytest
import torch
from helpers.oracle import decode, fake_quant
from helpers.policies import FLOOR, FORMATS, HIF8, RECIPES, policy

from quaver.backends import OperandError
from quaver.errors import StaleWeightError
from quaver.low_precision import (
    HiF8Tensor,
    MXFP8Tensor,
    QuantizedWeightTensor,
    WeightSpec,
    low_precision_linear,
)


def weight(recipe_id, *shape, kind="dense", bound=None):
    torch.manual_seed(0)
    master = torch.randn(shape)
    recipe = (bound or policy(recipe_id)).recipe
    return QuantizedWeightTensor.from_master(master, WeightSpec("block.w", kind, recipe)), master


@pytest.mark.parametrize("recipe_id", RECIPES)
def test_dense_operands_hold_the_master_quantised_along_k_and_along_n(recipe_id):
    flight, master = weight(recipe_id, 96, 80)
    assert type(flight) is (HiF8Tensor if recipe_id == HIF8 else MXFP8Tensor)
    assert (flight.shape, flight.dtype, flight.version) == ((96, 80), torch.bfloat16, 0)
    for side, axis in (("row", 1), ("col", 0)):
        operand = flight.select(side)
        assert (operand.orientation, operand.format) == (side, recipe_id.split("/")[0])
        assert torch.equal(decode(operand), fake_quant(master, axis, recipe_id))


@pytest.mark.parametrize("recipe_id", RECIPES)
def test_grouped_operands_are_seen_as_e_k_n(recipe_id):
    """`col` contracts K in the forward pass, `row` contracts N; HiF8 has one scale an expert."""
    flight, master = weight(recipe_id, 3, 96, 80, kind="grouped")
    for side, axis in (("col", 1), ("row", 0)):
        operand = flight.select(side)
        assert operand.shape == (3, 80, 96)
        wanted = torch.stack([fake_quant(m, axis, recipe_id).t() for m in master])
        assert torch.equal(decode(operand), wanted)


@pytest.mark.parametrize("recipe_id", FORMATS)
def test_no_op_computes_with_codes(recipe_id):
    flight, _ = weight(recipe_id, 96, 64)
    x = torch.randn(4, 64)
    for compute in (
        lambda: torch.nn.functional.linear(x.bfloat16(), flight),
        lambda: flight * 2,
        lambda: flight.float(),
        lambda: flight.t(),
        lambda: flight.clone(),
        lambda: flight.mul_(2),
        lambda: flight.sum(),
        lambda: flight.as_strided((2, 2), (1, 1)),
    ):
        with pytest.raises(
            OperandError, match=r"(?s)no numbers to compute with.*block\.w.*low-precision module"
        ):
            compute()
    zeros = torch.zeros_like(flight)
    assert (type(zeros), zeros.dtype, zeros.shape) == (torch.Tensor, torch.bfloat16, (96, 64))


def test_aliases_share_the_codes_and_follow_a_swap():
    """FSDP re-wraps the weight with as_strided and detach; autograd saves that; a gather swaps what is inside."""
    flight, _ = weight(FLOOR, 96, 64)
    alias = flight.detach().as_strided((96, 64), (64, 1))
    assert alias.physical is flight.physical
    flight.refresh_from_master(torch.ones(96, 64))
    assert alias.version == flight.version == 1
    assert torch.equal(decode(alias.select("row")), torch.ones(96, 64).double())


def test_a_direction_that_was_not_gathered_is_named():
    flight, _ = weight(FLOOR, 96, 64)
    del flight.physical["col_data"], flight.physical["col_scale"]
    assert flight.select("row").shape == (96, 64)
    with pytest.raises(StaleWeightError, match=r"(?s)col direction was not gathered.*block\.w"):
        flight.select("col")


@pytest.mark.parametrize("recipe_id", FORMATS)
def test_an_unknown_orientation_is_named(recipe_id):
    flight, _ = weight(recipe_id, 96, 64)
    with pytest.raises(OperandError, match="'diagonal' is neither row nor col"):
        flight.select("diagonal")


def test_a_linear_runs_on_a_weight_in_flight_and_its_gradient_is_bf16():
    bound = policy(FLOOR)
    flight, master = weight(FLOOR, 96, 64, bound=bound)
    flight.requires_grad_()
    x = torch.randn(4, 64).bfloat16().requires_grad_()
    y = low_precision_linear(x, flight, fqn="block", recipe=bound.recipe)
    y.sum().backward()
    assert (type(flight.grad), flight.grad.dtype, flight.grad.shape) == (
        torch.Tensor,
        torch.bfloat16,
        (96, 64),
    )
    wanted = (fake_quant(x, 1, FLOOR) @ fake_quant(master, 1, FLOOR).t()).bfloat16()
    assert torch.equal(y.detach(), wanted)


def test_a_refresh_under_a_pending_backward_raises():
    bound = policy(HIF8)
    flight, master = weight(HIF8, 96, 64, bound=bound)
    x = torch.randn(4, 64).bfloat16().requires_grad_()
    y = low_precision_linear(x, flight, fqn="block", recipe=bound.recipe)
    flight.refresh_from_master(master)
    with pytest.raises(StaleWeightError, match=r"(?s)between forward and backward.*block\.w"):
        y.sum().backward()


@pytest.mark.parametrize("base", [QuantizedWeightTensor])
def test_the_base_class_has_no_format(base):
    spec = WeightSpec("w", "dense", policy(FLOOR).recipe)
    for call in (
        lambda: base.quantize_master(torch.ones(2, 2), spec),
        lambda: base.gather_fields(spec, None),
        lambda: base.operand({}, spec, "row"),
    ):
        with pytest.raises(TypeError, match="is a base"):
            call()


@pytest.mark.parametrize("shape", [(), (4,), (2, 3, 4, 5)])
def test_masters_are_two_or_three_dimensional(shape):
    with pytest.raises(OperandError, match=r"(?s)wanted \[N, K\] or \[E, N, K\].*block\.w|block\.w.*wanted"):
        weight(FLOOR, *shape)
