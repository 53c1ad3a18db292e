"""Gradients that grow to FP32 are torch's own to the bit, whoever widens them."""

from __future__ import annotations

import pytest
import torch

from quaver.backends.native import kernels

ALL = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("rest", [0, 1, 15, 17, 16384 + 5])
def test_every_pattern_and_odd_rests(compiled, monkeypatch, threads, rest):
    calls, call = [], kernels.call
    monkeypatch.setattr(kernels, "call", lambda name, *rest: (calls.append(name), call(name, *rest))[1])
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    x = torch.cat([ALL.repeat(8), ALL[:rest]])
    found = kernels.widened(x, torch.float32)
    assert calls == ["quaver_widen"]
    assert torch.equal(found.view(torch.int32), x.to(torch.float32).view(torch.int32))


@pytest.mark.parametrize(
    ("x", "dtype"),
    [
        (ALL, torch.float32),  # small
        (ALL.repeat(16).view(1024, 1024).t(), torch.float32),  # a view with strides
        (ALL.repeat(16).float(), torch.float32),
        (ALL.repeat(16).float(), torch.bfloat16),
        (ALL.repeat(16), torch.float64),
    ],
)
def test_all_else_is_torchs(compiled, monkeypatch, x, dtype):
    monkeypatch.setattr(kernels, "call", lambda *_: pytest.fail("a kernel ran"))
    found = kernels.widened(x, dtype)
    assert found.dtype is dtype
    assert torch.allclose(found, x.to(dtype), rtol=0, atol=0, equal_nan=True)
