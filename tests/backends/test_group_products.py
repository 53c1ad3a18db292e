"""Grouped products: the bits of one product a group, however many groups share a call."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from quaver.backends.products import multiply_rows, multiply_tokens

COUNTS = [[5, 5, 5], [5, 5, 0, 0, 3, 3, 3, 5], [0, 0, 7], [7], [0, 0], [], [1, 2, 3], [4, 4, 0]]
K, N = 64, 96


class Counted(TorchDispatchMode):
    """How often each kind of product is called."""

    def __init__(self):
        super().__init__()
        self.calls = {"mm": 0, "bmm": 0, "addmm": 0}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in self.calls:
            self.calls[name] += 1
        return func(*args, **(kwargs or {}))


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def parts(x, counts):
    return x.split(counts) if counts else ()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_rows_times_each_groups_own_matrix(counts, transposed):
    x, w = drawn(sum(counts), K), drawn(len(counts), K, N, seed=1)
    if transposed:
        w = w.mT.contiguous().mT
    found = multiply_rows(x, w, list(accumulate(counts)), (None, None), torch.bfloat16)
    wanted = [torch.mm(rows, w[e]) for e, rows in enumerate(parts(x, counts))]
    assert torch.equal(found, torch.cat(wanted) if wanted else x.new_empty(0, N))


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_rows_turned_times_rows(counts):
    g, x = drawn(sum(counts), N), drawn(sum(counts), K, seed=1)
    found = multiply_tokens(g, x, list(accumulate(counts)), (None, None), torch.bfloat16)
    assert found.shape == (len(counts), N, K)
    for one, g_rows, x_rows in zip(found, parts(g, counts), parts(x, counts)):
        assert torch.equal(one, torch.mm(g_rows.t(), x_rows) if len(g_rows) else torch.zeros(N, K).bfloat16())


def test_neighbours_of_equal_length_share_a_call():
    counts = [5, 5, 0, 3, 3, 3, 5]
    ends, x, g = list(accumulate(counts)), drawn(sum(counts), K), drawn(sum(counts), N)
    with Counted() as counted:
        multiply_rows(x, drawn(len(counts), K, N), ends, (None, None), torch.bfloat16)
        multiply_tokens(g, x, ends, (None, None), torch.bfloat16)
    assert counted.calls == {"mm": 2, "bmm": 4, "addmm": 0}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_scaled_groups_are_multiplied_one_by_one_each_with_its_scale(dtype):
    counts = [5, 5, 0, 5]
    ends, x, w = list(accumulate(counts)), drawn(sum(counts), K), drawn(len(counts), K, N, seed=1)
    left, right = torch.tensor(0.37), torch.tensor([1.0, 3.0, 5.0, 0.1])
    found = multiply_rows(x, w, ends, (left, right), dtype)
    for e, (rows, one) in enumerate(zip(parts(x, counts), parts(found, counts))):
        exact = rows.double() @ w[e].double() * (float(left) * float(right[e]))
        torch.testing.assert_close(one.double(), exact, rtol=2**-8 if dtype is torch.bfloat16 else 1e-5, atol=1e-4)
    g = drawn(sum(counts), N, seed=2)
    found = multiply_tokens(g, x, ends, (left, None), dtype)
    for one, g_rows, x_rows in zip(found, parts(g, counts), parts(x, counts)):
        exact = g_rows.double().t() @ x_rows.double() * float(left)
        torch.testing.assert_close(one.double(), exact, rtol=2**-8 if dtype is torch.bfloat16 else 1e-5, atol=1e-4)


def test_fp32_results_are_added_up_group_by_group():
    x, w = drawn(10, K), drawn(2, K, N)
    with Counted() as counted:
        found = multiply_rows(x, w, [5, 10], (None, None), torch.float32)
    assert counted.calls == {"mm": 2, "bmm": 0, "addmm": 0}
    assert torch.equal(found, torch.cat([torch.mm(x[:5].float(), w[0].float()), torch.mm(x[5:].float(), w[1].float())]))
