"""The ledger has two sides, modules that announce and backends that record; each difference is found."""

from __future__ import annotations

import pytest
import torch
from helpers.policies import FLOOR, HIF8, linear, mlp, policy
from torch import nn
from torch.utils.checkpoint import checkpoint

from quaver.backends import GemmSite, Ledger, PlannedSite
from quaver.errors import LedgerError
from quaver.low_precision import planned_sites


def step(model, *, recompute=False, grad_input=True):
    x = torch.randn(8, 64).bfloat16().requires_grad_(grad_input)
    y = checkpoint(model, x, use_reentrant=False) if recompute else model(x)
    y.float().pow(2).mean().backward()


def counts(ledger):
    return {
        (e["fqn"], e["gemm"]): (e["count"], e["recomputed"], e["inference"])
        for e in ledger.to_json(ok=True)["entries"]
    }


def test_a_step_agrees_with_the_plan_and_the_document_has_its_shape():
    bound = policy(FLOOR)
    bound.backend.ledger.recipe = FLOOR
    model = mlp(bound)
    step(model)
    step(model)
    ledger = bound.backend.ledger
    assert planned_sites(model) == [
        PlannedSite("0", "dense", "mxfp8_e4m3", ("fprop", "dgrad", "wgrad")),
        PlannedSite("2", "dense", "mxfp8_e4m3", ("fprop", "dgrad", "wgrad")),
    ]
    ledger.check(planned_sites(model), micro_steps=2)
    document = ledger.to_json(ok=True)
    assert set(document) == {"recipe", "ok", "entries", "idle_experts"}
    assert document["recipe"] == FLOOR
    assert document["ok"] is True
    assert document["idle_experts"] == []
    assert document["entries"][0] == {
        "fqn": "0",
        "kind": "dense",
        "gemm": "dgrad",
        "format": "mxfp8_e4m3",
        "kernel": "reference_matmul",
        "count": 2,
        "recomputed": 0,
        "inference": 0,
    }
    assert counts(ledger) == {(fqn, gemm): (2, 0, 0) for fqn in "02" for gemm in ("fprop", "dgrad", "wgrad")}


def test_low_precision_off_is_an_empty_document():
    assert Ledger().to_json(ok=True) == {"recipe": None, "ok": True, "entries": [], "idle_experts": []}


def test_recomputed_and_inference_forward_passes_have_counts_of_their_own():
    bound = policy(HIF8)
    model = mlp(bound)
    step(model, recompute=True)
    with torch.no_grad():
        model(torch.randn(3, 64))
    assert counts(bound.backend.ledger) == {
        **{(fqn, "fprop"): (1, 1, 1) for fqn in "02"},
        **{(fqn, gemm): (1, 0, 0) for fqn in "02" for gemm in ("dgrad", "wgrad")},
    }
    bound.backend.ledger.check(planned_sites(model), micro_steps=1)


def test_an_input_without_gradient_wants_no_dgrad_and_a_frozen_weight_no_wgrad():
    bound = policy(FLOOR)
    model = mlp(bound)
    model[2].weight.requires_grad_(False)
    step(model, grad_input=False)
    ran = {("0", "fprop"), ("0", "wgrad"), ("2", "fprop"), ("2", "dgrad")}
    assert set(counts(bound.backend.ledger)) == ran
    bound.backend.ledger.check(planned_sites(model), micro_steps=1)


def test_a_wholly_frozen_module_still_takes_part_in_training():
    """Its input has no gradient and its weight is frozen, but the pass is one of the micro-step's."""
    bound = policy(FLOOR)
    model = mlp(bound)
    model[0].requires_grad_(False)
    step(model, grad_input=False)
    ledger = bound.backend.ledger
    assert counts(ledger)["0", "fprop"] == (1, 0, 0)
    ledger.check(planned_sites(model), micro_steps=1)


def test_a_gemm_around_the_backend_is_a_difference():
    """fprop in high precision: announced, never recorded."""

    class Leak(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            self.inner.recipe.backend.ledger.announce("0", input_grad=True, weight_grad=True)
            return nn.functional.linear(x, self.inner.weight.master.to(x.dtype))

    bound = policy(FLOOR)
    model = mlp(bound)
    plan = planned_sites(model)
    step(nn.Sequential(Leak(model[0]), model[2]))
    found = bound.backend.ledger.differences(plan)
    assert [line for line in found if line.startswith("0 ")] == [
        f"0 {gemm}: 0 GEMMs through the backend, 1 announced" for gemm in ("fprop", "dgrad", "wgrad")
    ]
    with pytest.raises(LedgerError, match="3 differences") as caught:
        bound.backend.ledger.check(plan)
    assert "0 fprop" in str(caught.value)
    assert caught.value.exit_code == 3


def test_a_gemm_that_no_module_announced_is_a_difference():
    bound = policy(FLOOR)
    module = linear(bound, torch.randn(32, 64))
    plan = planned_sites(module)
    step(module)
    row = bound.recipe.quantizer("input_fwd").quantize(torch.randn(2, 64), orientation="row")
    site, weight = GemmSite("block.proj", "fprop"), module.weight.select("row")
    bound.backend.low_precision_matmul(row, weight, layout="NT", output_dtype=torch.float32, site=site)
    found = bound.backend.ledger.differences(plan)
    assert found == ["block.proj fprop: 2 GEMMs through the backend, 1 announced"]


def test_an_unplanned_module_is_a_difference():
    bound = policy(FLOOR)
    model = mlp(bound)
    step(model)
    found = bound.backend.ledger.differences(planned_sites(model)[:1])
    assert found == [
        f"2 {gemm}: 1 GEMMs of a module that is not in the plan" for gemm in ("fprop", "dgrad", "wgrad")
    ]


def test_an_unplanned_module_whose_gemms_bypass_the_backend_is_a_difference():
    ledger = Ledger()
    ledger.announce("stray", input_grad=True, weight_grad=True)
    assert ledger.differences([]) == ["stray: called as a low-precision module, but not in the plan"]


def test_a_planned_module_that_never_ran_is_a_difference():
    bound = policy(FLOOR)
    model = mlp(bound)
    step(model[0])
    assert bound.backend.ledger.differences(planned_sites(model)) == [
        "2: no training forward pass went through the low-precision module"
    ]


def test_the_wrong_format_or_kind_is_a_difference():
    bound = policy(FLOOR)
    module = linear(bound, torch.randn(32, 64))
    step(module)
    (site,) = planned_sites(module)
    for wrong in (PlannedSite(site.fqn, "grouped", site.format), PlannedSite(site.fqn, "dense", "hif8")):
        found = bound.backend.ledger.differences([wrong])
        assert len(found) == 3
        assert f"planned as {wrong.kind} {wrong.format}" in found[0]


def test_a_missing_micro_step_is_a_difference():
    bound = policy(FLOOR)
    module = linear(bound, torch.randn(32, 64))
    step(module)
    assert bound.backend.ledger.differences(planned_sites(module), micro_steps=2) == [
        "block.proj: 1 training forward passes, 2 micro-steps were run"
    ]


@pytest.mark.parametrize("kind_of_pass", ["recomputed", "inference"])
def test_recomputed_and_inference_passes_around_the_backend_are_differences(kind_of_pass):
    bound = policy(FLOOR)
    module = linear(bound, torch.randn(32, 64))
    step(module)
    ledger = bound.backend.ledger
    ledger.calls["block.proj", kind_of_pass] += 1
    assert ledger.differences(planned_sites(module)) == [
        f"block.proj {kind_of_pass} fprop: 0 through the backend, 1 announced"
    ]


def test_a_kernel_that_failed_is_not_counted():
    ledger = Ledger()

    def failing():
        with ledger.record(GemmSite("m", "fprop"), kind="dense", format="hif8", kernel="k"):
            assert ledger.active == GemmSite("m", "fprop")
            raise RuntimeError("kernel")

    with pytest.raises(RuntimeError, match="kernel"):
        failing()
    assert ledger.active is None
    assert not ledger.executed


def test_idle_experts_are_those_without_tokens_in_training():
    ledger = Ledger()
    ledger.note_expert_tokens("experts", [3, 0, 0])
    ledger.note_expert_tokens("experts", [1, 2, 0])
    with torch.no_grad():
        ledger.note_expert_tokens("experts", [0, 0, 9])
    assert ledger.idle_experts() == ["experts[2]"]
