"""Recipes are frozen data under a versioned id; roles decide scaling, orientation never does."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from helpers.policies import FLOOR, HIF8, RCEIL, policy

from quaver.backends import QuantizationRole, ReferenceBackend, ScalingSpec
from quaver.errors import CapabilityError
from quaver.low_precision import RECIPES, HiF8Tensor, MXFP8Tensor, policy_for

Role = QuantizationRole


def test_the_table_of_recipes():
    """The constants of version 1, which never change: a new constant is a new version."""
    assert set(RECIPES) == {FLOOR, RCEIL, HIF8}
    for rule, recipe_id in (("floor", FLOOR), ("rceil", RCEIL)):
        assert set(RECIPES[recipe_id].roles.values()) == {
            ScalingSpec("mxfp8_e4m3", block=32, scale_rule=rule)
        }
        assert set(RECIPES[recipe_id].roles) == set(Role)
    maxima = {role.value: spec.format_max for role, spec in RECIPES[HIF8].roles.items()}
    assert maxima == {
        "input_fwd": 15.0, "weight_fwd": 15.0, "grad_output": 224.0, "input_bwd": 15.0, "weight_bwd": 15.0
    }  # fmt: skip
    assert {spec.block for spec in RECIPES[HIF8].roles.values()} == {None}


def test_a_policy_binds_recipe_weights_and_backend():
    for recipe_id, weights in ((FLOOR, MXFP8Tensor), (RCEIL, MXFP8Tensor), (HIF8, HiF8Tensor)):
        backend = ReferenceBackend()
        bound = policy(recipe_id, backend)
        assert bound.recipe.weight_class is weights
        assert bound.backend is bound.recipe.quantizer(Role.INPUT_FWD).backend is backend
        assert bound.recipe.id == recipe_id


def test_an_unknown_recipe_is_named():
    with pytest.raises(CapabilityError, match=r"(?s)no recipe 'hif8/current@2'.*hif8/current@1"):
        policy_for(SimpleNamespace(recipe_id="hif8/current@2"), ReferenceBackend())


def test_hif8_maps_amax_to_the_roles_maximum():
    """scale = amax / 15 or / 224, so amax itself is coded as that maximum."""
    x = torch.tensor([[3.0, -0.5], [0.25, 1.0]])
    for role in Role:
        operand = policy(HIF8).recipe.quantizer(role).quantize(x, orientation="row")
        top = 224.0 if role is Role.GRAD_OUTPUT else 15.0
        assert operand.scale == torch.tensor(3.0) / top
        assert operand.data[0, 0] == (0x4F if role is Role.GRAD_OUTPUT else 0x2F)


@pytest.mark.parametrize("amax", [0.0, 1e-45, float("nan"), float("inf")])
def test_hif8_scales_of_extreme_tensors_are_one(amax):
    operand = (
        policy(HIF8).recipe.quantizer(Role.INPUT_FWD).quantize(torch.full((2, 2), amax), orientation="row")
    )
    assert operand.scale == 1.0


def test_a_pair_is_one_call_where_the_roles_are_scaled_alike():
    calls = []

    class Counting(ReferenceBackend):
        def quantize(self, tensor, **kwargs):
            calls.append("quantize")
            return super().quantize(tensor, **kwargs)

        def quantize_dual(self, tensor, **kwargs):
            calls.append("quantize_dual")
            return super().quantize_dual(tensor, **kwargs)

    recipe = policy(HIF8, Counting()).recipe
    row, col = recipe.quantize_pair(torch.ones(2, 2), Role.INPUT_FWD, Role.INPUT_BWD)
    assert calls == ["quantize_dual"]
    assert (row.orientation, col.orientation) == ("row", "col")
    row, col = recipe.quantize_pair(torch.ones(2, 2), Role.INPUT_FWD, Role.GRAD_OUTPUT)
    assert calls == ["quantize_dual", "quantize", "quantize"]
    assert row.scale * 15 == col.scale * 224 == 1


def test_amax_from_outside_overrides_the_tensors_own_where_there_is_one_scale():
    """What a sharded weight needs: one scale over all ranks."""
    shard = torch.tensor([[1.0, 2.0]])
    hif8 = policy(HIF8).recipe.quantizer(Role.WEIGHT_FWD)
    assert hif8.quantize(shard, orientation="row", amax=torch.tensor(30.0)).scale == 2.0
    with pytest.raises(ValueError, match="amax"):
        policy(FLOOR).recipe.quantizer(Role.WEIGHT_FWD).quantize(
            shard, orientation="row", amax=torch.tensor(30.0)
        )
