"""The summed loss in chunks against torch's cross-entropy of FP32 logits: loss and gradient bit for bit."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from quaver.models import losses, summed_nats


def reference(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float().flatten(0, -2), labels.flatten(), reduction="sum")


def drawn(*shape: int, dtype: torch.dtype, scale: float = 6.0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    logits = (torch.randn(*shape, generator=generator) * scale).to(dtype).requires_grad_()
    return logits, torch.randint(0, shape[-1], shape[:-1], generator=generator)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(2, 40, 1000), (1, 1, 7), (3, 129, 33), (300, 257), (1, 9, 70_001)])
@pytest.mark.parametrize("elements", [1, 5_000, 2**18])
def test_loss_and_gradient_are_torchs_own_bits(
    dtype: torch.dtype, shape: tuple[int, ...], elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses, "CHUNK_ELEMENTS", elements)
    logits, labels = drawn(*shape, dtype=dtype)
    ours, theirs = summed_nats(logits, labels) / 37, reference(logits, labels) / 37
    assert torch.equal(ours, theirs)
    (got,), (wanted,) = torch.autograd.grad(ours, logits), torch.autograd.grad(theirs, logits)
    assert got.dtype == dtype
    assert torch.equal(got, wanted)
    with torch.no_grad():
        assert torch.equal(summed_nats(logits, labels), reference(logits, labels))


@pytest.mark.parametrize("level", ["default", "avx2"])
def test_the_bits_hold_with_other_vector_widths(level: str) -> None:
    code = (
        "import torch, torch.nn.functional as F; from quaver.models import summed_nats; torch.manual_seed(1);"
        "x = (torch.randn(50, 301) * 5).bfloat16().requires_grad_(); y = torch.randint(0, 301, (50,));"
        "a, b = summed_nats(x, y) / 7, F.cross_entropy(x.float(), y, reduction='sum') / 7;"
        "assert torch.equal(a, b);"
        "assert torch.equal(torch.autograd.grad(a, x)[0], torch.autograd.grad(b, x)[0])"
    )
    subprocess.run(
        [sys.executable, "-c", code], check=True, env={**os.environ, "ATEN_CPU_CAPABILITY": level}
    )


def test_known_answers() -> None:
    even = torch.zeros(5, 8, requires_grad=True)
    loss = summed_nats(even, torch.arange(5))
    assert loss.item() == pytest.approx(5 * math.log(8))
    loss.backward()
    wanted = torch.full((5, 8), 1 / 8)
    wanted[torch.arange(5), torch.arange(5)] -= 1
    assert even.grad is not None
    assert torch.allclose(even.grad, wanted)


@pytest.mark.parametrize("value", [1e30, -1e30, math.inf, -math.inf, math.nan])
def test_extreme_logits_give_what_torch_gives(value: float) -> None:
    logits, labels = drawn(4, 20, dtype=torch.float32)
    with torch.no_grad():
        logits[1, 3] = value
        logits[2] = value
    ours, theirs = summed_nats(logits, labels), reference(logits, labels)
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert torch.equal(ours.nan_to_num(0.5), theirs.nan_to_num(0.5))
    (got,), (wanted,) = torch.autograd.grad(ours, logits), torch.autograd.grad(theirs, logits)
    assert torch.equal(got.isnan(), wanted.isnan())
    assert torch.equal(got.nan_to_num(0.5), wanted.nan_to_num(0.5))


def test_no_fp32_tensor_of_the_size_of_the_logits_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for leaf in tree_leaves(out):
                if isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float32:
                    Largest.elements = max(Largest.elements, leaf.untyped_storage().nbytes() // 4)
            return out

    monkeypatch.setattr(losses, "CHUNK_ELEMENTS", 2_000)
    logits, labels = drawn(400, 100, dtype=torch.bfloat16)
    with Largest():
        summed_nats(logits, labels).backward()
    assert 0 < Largest.elements <= 2_000 * torch.get_num_threads()


@pytest.mark.parametrize("label", [-100, -1, 100])
def test_a_label_outside_the_vocabulary_is_an_error(label: int) -> None:
    with pytest.raises(RuntimeError, match="out of bounds"):
        summed_nats(torch.zeros(2, 100), torch.tensor([3, label]))
