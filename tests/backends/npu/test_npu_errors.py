"""A kernel's error surfaces as itself, with FQN and gemm in its notes; nothing is computed in its place."""

from __future__ import annotations

import pytest
import torch
from helpers import npu_harness
from helpers.npu_harness.recording import Recorder, Spy
from helpers.passes import one_pass
from helpers.policies import FORMATS, linear, policy
from helpers.tracing import GemmTrace


class KernelError(Exception):
    """An error of a kernel that nobody knows."""


def run(recipe, op):
    backend, error = npu_harness.backend(), KernelError("507035: the vector core is gone")
    trace = GemmTrace(backend.ledger)
    with Recorder(spoil={op: error}), trace, pytest.raises(KernelError) as caught:
        one_pass(policy(recipe, backend))
    assert caught.value is error
    return backend, trace, error


@pytest.mark.parametrize("op", ["npu_quant_matmul", "npu_grouped_matmul"])
@pytest.mark.parametrize("recipe", FORMATS)
def test_of_a_product(recipe, op):
    backend, trace, error = run(recipe, op)
    fqn = "block.proj" if op == "npu_quant_matmul" else "gate_up"
    assert any(f"{fqn} fprop" in note and op in note for note in error.__notes__)
    assert not trace.seen, "a product in high precision"
    assert not any(key[4] == op for key in backend.ledger.executed)


@pytest.mark.parametrize("gemm", ["dgrad", "wgrad"])
@pytest.mark.parametrize("recipe", FORMATS)
def test_of_a_backward_product(recipe, gemm, monkeypatch):
    """The second or third call of the operator: autograd's engine hands the very error on."""
    backend, error = npu_harness.backend(), KernelError("507035")
    layer = linear(policy(recipe, backend), torch.randn(80, 96))
    y = layer(torch.randn(70, 96).bfloat16().requires_grad_())
    calls = []

    def spoiled(operator, *args, **kwargs):
        calls.append(1)
        if len(calls) == {"dgrad": 1, "wgrad": 2}[gemm]:
            raise error
        return operator(*args, **kwargs)

    monkeypatch.setattr(torch.ops.npu, "npu_quant_matmul", Spy(torch.ops.npu.npu_quant_matmul, spoiled))
    trace = GemmTrace(backend.ledger)
    with trace, pytest.raises(KernelError) as caught:
        y.float().pow(2).sum().backward()
    assert caught.value is error
    assert any(f"block.proj {gemm}" in note for note in error.__notes__)
    assert not trace.seen
    assert not any(key[2] == gemm for key in backend.ledger.executed)


@pytest.mark.parametrize(
    ("recipe", "op"), list(zip(FORMATS, ["npu_dynamic_mx_quant_with_dual_axis", "npu_dynamic_quant"]))
)
def test_of_a_quantiser(recipe, op):
    backend, trace, error = run(recipe, op)
    assert any("quantising (70, 96)" in note and "input_fwd" in note for note in error.__notes__)
    assert not trace.seen
    assert not backend.ledger.executed


@pytest.mark.parametrize("recipe", FORMATS)
def test_all_products_of_a_pass_are_the_npus(recipe):
    """Without an error too: no product runs outside of the two operators."""
    backend = npu_harness.backend()
    trace = GemmTrace(backend.ledger)
    with trace:
        one_pass(policy(recipe, backend))
    assert not trace.seen
    assert sum(backend.ledger.executed.values()) == 9
    assert {key[4] for key in backend.ledger.executed} == {"npu_quant_matmul", "npu_grouped_matmul"}
