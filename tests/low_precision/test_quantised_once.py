"""Weights are quantised once a step, and what is quantised stays where it is until the next one."""

from __future__ import annotations

import pytest
import torch
from helpers.experts import grouped_weight, routing_of
from helpers.policies import FLOOR, FORMATS, HIF8, linear, mlp, policy
from helpers.recording import Quantised, RecordingBackend
from torch.utils.checkpoint import checkpoint

from quaver.backends import QuantizationRole, native
from quaver.low_precision import low_precision_grouped_swiglu, quantised_weights, refresh_stale

Role = QuantizationRole


def storage(weights):
    """Address and bytes of every physical tensor."""
    return {
        (fqn, name): (tensor.data_ptr(), tensor.clone())
        for fqn, (_, local) in weights.items()
        for name, tensor in local.physical.items()
    }


def same(a, b):
    return a.keys() == b.keys() and all(a[k][0] == b[k][0] and torch.equal(a[k][1], b[k][1]) for k in a)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("recipe_id", FORMATS)
def test_four_micro_steps_and_recompute_quantise_no_weight(recipe_id, recompute):
    backend = RecordingBackend()
    model = mlp(policy(recipe_id, backend))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    call = "quantize" if recipe_id == HIF8 else "quantize_dual"
    once = [Quantised(Role.WEIGHT_FWD, call, shape) for shape in ((96, 64), (64, 96))]
    assert backend.weight_calls() == once
    for step in range(2):
        before = storage(quantised_weights(model))
        assert len(before) == (4 if recipe_id == HIF8 else 8)
        for micro_step in range(4):
            x = torch.randn(8, 64, generator=torch.Generator().manual_seed(micro_step)).bfloat16()
            y = checkpoint(model, x.requires_grad_(), use_reentrant=False) if recompute else model(x)
            y.float().pow(2).mean().backward()
            assert same(before, storage(quantised_weights(model)))
        with torch.no_grad():
            model(x)
        assert len(backend.weight_calls()) == 2 * (step + 1)
        optimizer.step()
        optimizer.zero_grad()
        assert refresh_stale(model, after_step=True) == ["0.weight", "2.weight"]
        assert refresh_stale(model, after_step=True) == []  # nothing was written since
        assert not same(before, storage(quantised_weights(model)))
        assert [local.state.refreshes for _, local in quantised_weights(model).values()] == [step + 1] * 2
    assert backend.weight_calls() == once * 3


@pytest.mark.parametrize("recipe_id", FORMATS)
def test_recompute_changes_no_bit(recipe_id):
    outputs = []
    for recompute in (False, True):
        model, x = (
            mlp(policy(recipe_id)),
            torch.randn(8, 64, generator=torch.Generator().manual_seed(0)).bfloat16(),
        )
        y = (
            checkpoint(model, x.requires_grad_(), use_reentrant=False)
            if recompute
            else model(x.requires_grad_())
        )
        y.float().pow(2).mean().backward()
        outputs.append([y.detach(), x.grad, *(p.grad for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*outputs))


def test_hif8_has_one_storage_for_both_directions():
    bound = policy(HIF8)
    for weight in (
        linear(bound, torch.randn(96, 64)).weight,
        grouped_weight(torch.randn(3, 96, 64), bound, "experts.w"),
    ):
        row, col = weight.select("row"), weight.select("col")
        assert row.data.data_ptr() == col.data.data_ptr() == weight.physical["data"].data_ptr()
        assert row.scale.data_ptr() == col.scale.data_ptr() == weight.physical["scale"].data_ptr()
        assert sum(t.nbytes for t in weight.physical.values()) == weight.numel() + 4 * max(
            1, weight.ndim // 3 * 3
        )


def test_mxfp8_operands_are_views_of_two_pairs():
    bound = policy(FLOOR)
    dense, grouped = (
        linear(bound, torch.randn(96, 64)).weight,
        grouped_weight(torch.randn(3, 96, 64), bound, "w"),
    )
    assert {k: tuple(t.shape) for k, t in dense.physical.items()} == {
        "row_data": (96, 64), "row_scale": (96, 2), "col_data": (96, 64), "col_scale": (3, 64)
    }  # fmt: skip
    # named as the grouped GEMM sees it, [E, K, N] = [3, 64, 96]; stored as the master is, [E, N, K]
    assert {k: tuple(t.shape) for k, t in grouped.physical.items()} == {
        "row_data": (3, 96, 64), "row_scale": (3, 3, 64), "col_data": (3, 96, 64), "col_scale": (3, 96, 2)
    }  # fmt: skip
    for weight in (dense, grouped):
        for side in ("row", "col"):
            operand = weight.select(side)
            assert operand.data.data_ptr() == weight.physical[f"{side}_data"].data_ptr()
            assert operand.scale.data_ptr() == weight.physical[f"{side}_scale"].data_ptr()
            assert all(t.dtype is torch.uint8 for t in weight.physical.values())
    assert grouped.select("col").shape == (3, 64, 96)


@pytest.mark.parametrize("recipe_id", FORMATS)
def test_activations_are_quantised_only_as_far_as_a_gradient_will_read_them(recipe_id):
    backend = RecordingBackend()
    module, x = linear(policy(recipe_id, backend), torch.randn(96, 64)), torch.randn(8, 64).bfloat16()
    calls = []
    for grads, frozen in ((True, False), (True, True), (False, False)):
        module.weight.requires_grad_(not frozen)
        backend.quantised.clear()
        with torch.set_grad_enabled(grads):
            module(x)
        calls.append([(q.role, q.call) for q in backend.quantised])
    both = [(Role.INPUT_FWD, "quantize_dual")]
    assert calls == [both, [(Role.INPUT_FWD, "quantize")], [(Role.INPUT_FWD, "quantize")]]


def test_grouped_activations_are_quantised_only_as_far_as_a_gradient_will_read_them():
    backend = RecordingBackend()
    bound = policy(FLOOR, backend)
    weights = [
        grouped_weight(torch.randn(3, 64, 64), bound, "gate_up"),
        grouped_weight(torch.randn(3, 64, 32), bound, "down"),
    ]
    index = routing_of([2, 0, 3])
    x, combine = torch.randn(5, 64).bfloat16(), torch.rand(5, 1)

    def calls(gate_up, down, grads=True):
        weights[0].requires_grad_(gate_up)
        weights[1].requires_grad_(down)
        backend.quantised.clear()
        leaf = x.clone().requires_grad_()
        with torch.set_grad_enabled(grads):
            y = low_precision_grouped_swiglu(
                leaf, index, combine, *weights, sites=("gate_up", "down"), recipe=bound.recipe
            )
        if grads:
            y.float().sum().backward()
        return [(q.role.value, q.call.removeprefix("quantize")) for q in backend.quantised]

    tokens = [("input_fwd", "_dual")] if native.usable() else [("input_fwd", ""), ("input_bwd", "")]
    assert calls(True, True) == [*tokens, ("input_fwd", "_dual"), ("grad_output", "_dual"), ("grad_output", "_dual")]
    assert calls(False, False) == [("input_fwd", "")] * 2 + [("grad_output", "")] * 2
    assert calls(True, True, grads=False) == [("input_fwd", "")] * 2
