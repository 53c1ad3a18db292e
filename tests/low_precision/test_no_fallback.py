"""Nothing falls back: an error is raised as it is, and every GEMM of a step lies inside a backend call."""

from __future__ import annotations

import pytest
import torch
from helpers.experts import grouped_weight, routing_of
from helpers.policies import FORMATS, linear, mlp, policy
from helpers.tracing import GemmTrace
from torch import nn
from torch.utils.checkpoint import checkpoint

from quaver.backends import GemmSite, ReferenceBackend
from quaver.low_precision import low_precision_grouped_swiglu

GEMMS = ["fprop", "dgrad", "wgrad"]


class KernelError(Exception):
    """An error of a kernel that nobody knows."""


class Broken(ReferenceBackend):
    """Fails in one GEMM, or in quantising for one role."""

    def __init__(self, gemm=None, role=None):
        super().__init__()
        self.gemm, self.role, self.error = gemm, role, KernelError("507035: the kernel exploded")

    def low_precision_matmul(self, *args, site, **kwargs):
        if site.gemm == self.gemm:
            raise self.error
        return super().low_precision_matmul(*args, site=site, **kwargs)

    def low_precision_grouped_matmul(self, *args, site, **kwargs):
        if site.gemm == self.gemm:
            raise self.error
        return super().low_precision_grouped_matmul(*args, site=site, **kwargs)

    def quantize(self, tensor, *, role, **kwargs):
        if role == self.role:
            raise self.error
        return super().quantize(tensor, role=role, **kwargs)

    def quantize_dual(self, tensor, *, role, **kwargs):
        if role == self.role:
            raise self.error
        return super().quantize_dual(tensor, role=role, **kwargs)


def dense_pass(bound):
    x = torch.randn(8, 64).bfloat16().requires_grad_()
    y = linear(bound, torch.randn(96, 64))(x)
    y.float().pow(2).sum().backward()


def grouped_pass(bound, counts=(3, 0, 5)):
    torch.manual_seed(0)
    gate_up = grouped_weight(torch.randn(3, 64, 64), bound, "gate_up")
    down = grouped_weight(torch.randn(3, 64, 32), bound, "down")
    index = routing_of(list(counts))
    x = torch.randn(index.shape[0], 64).bfloat16().requires_grad_()
    weights = torch.rand(index.shape, requires_grad=True)
    low_precision_grouped_swiglu(
        x, index, weights, gate_up, down, sites=("gate_up", "down"), recipe=bound.recipe
    ).float().pow(2).sum().backward()


@pytest.mark.parametrize("run", [dense_pass, grouped_pass])
@pytest.mark.parametrize("gemm", GEMMS)
@pytest.mark.parametrize("recipe_id", FORMATS)
def test_a_kernels_error_is_raised_as_itself_and_no_gemm_takes_its_place(recipe_id, gemm, run):
    backend = Broken(gemm=gemm)
    trace = GemmTrace(backend.ledger)
    with trace, pytest.raises(KernelError) as caught:
        run(policy(recipe_id, backend))
    assert caught.value is backend.error
    assert None not in trace.seen
    assert gemm not in {site.gemm for site in trace.seen}
    assert gemm not in {key[2] for key in backend.ledger.executed}


@pytest.mark.parametrize("run", [dense_pass, grouped_pass])
@pytest.mark.parametrize("role", ["weight_fwd", "input_fwd", "grad_output"])
def test_an_error_while_quantising_is_raised_as_itself(role, run):
    backend = Broken(role=role)
    trace = GemmTrace(backend.ledger)
    with trace, pytest.raises(KernelError) as caught:
        run(policy(FORMATS[0], backend))
    assert caught.value is backend.error
    assert None not in trace.seen
    (note,) = caught.value.__notes__
    assert note.endswith(f", quantising {role}")
    assert note.startswith("in block.proj" if run is dense_pass else "in gate_up")


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("recipe_id", FORMATS)
def test_every_gemm_of_a_dense_step_is_inside_a_backend_call(recipe_id, recompute):
    """The dispatcher counts below autograd, the ledger in the backend: the totals agree, none is left over."""
    bound = policy(recipe_id)
    ledger, model = bound.backend.ledger, mlp(bound)
    x = torch.randn(8, 64).bfloat16().requires_grad_()
    with GemmTrace(ledger) as trace:
        y = checkpoint(model, x, use_reentrant=False) if recompute else model(x)
        y.float().pow(2).mean().backward()
    assert trace.seen == {
        GemmSite(fqn, gemm): 2 if recompute and gemm == "fprop" else 1 for fqn in ("0", "2") for gemm in GEMMS
    }
    assert trace.seen.total() == ledger.executed.total() + ledger.recomputed.total()


@pytest.mark.parametrize("recipe_id", FORMATS)
def test_every_gemm_of_a_grouped_step_is_inside_a_backend_call(recipe_id):
    """One GEMM for each expert that has tokens; the ledger counts the grouped call once."""
    bound = policy(recipe_id)
    with GemmTrace(bound.backend.ledger) as trace:
        grouped_pass(bound)
    assert trace.seen == {GemmSite(fqn, gemm): 2 for fqn in ("gate_up", "down") for gemm in GEMMS}
    assert set(bound.backend.ledger.executed.values()) == {1}
    assert len(bound.backend.ledger.executed) == 6


def test_the_trace_sees_what_goes_around():
    bound = policy(FORMATS[0])
    with GemmTrace(bound.backend.ledger) as trace:
        nn.functional.linear(torch.randn(4, 64), linear(bound, torch.randn(96, 64)).weight.master)
        torch.einsum("tk,nk->tn", torch.randn(4, 64), torch.randn(96, 64))
    assert trace.seen[None] == 2


@pytest.mark.parametrize("recipe_id", FORMATS)
def test_a_frozen_weight_has_no_wgrad(recipe_id):
    bound = policy(recipe_id)
    module = linear(bound, torch.randn(96, 64), torch.randn(96), requires_grad=False)
    x = torch.randn(8, 64).bfloat16().requires_grad_()
    with GemmTrace(bound.backend.ledger) as trace:
        module(x).float().pow(2).sum().backward()
    assert {site.gemm for site in trace.seen} == {"fprop", "dgrad"}
    assert module.weight.grad is None
    assert module.bias.grad is not None
    assert x.grad is not None
