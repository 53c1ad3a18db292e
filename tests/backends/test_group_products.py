"""Grouped products: the bits of one product a group, however many groups share a call."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from quaver.backends.products import ONEDNN_FROM, multiply, multiply_rows, multiply_tokens, onednn_multiplies

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
    wanted = [multiply(rows, w[e], None, torch.bfloat16) for e, rows in enumerate(parts(x, counts))]
    assert torch.equal(found, torch.cat(wanted) if wanted else x.new_empty(0, N))


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_rows_turned_times_rows(counts):
    g, x = drawn(sum(counts), N), drawn(sum(counts), K, seed=1)
    found = multiply_tokens(g, x, list(accumulate(counts)), (None, None), torch.bfloat16)
    assert found.shape == (len(counts), N, K)
    for one, g_rows, x_rows in zip(found, parts(g, counts), parts(x, counts)):
        alone = multiply(g_rows.t(), x_rows, None, torch.bfloat16) if len(g_rows) else torch.zeros(N, K).bfloat16()
        assert torch.equal(one, alone)


@pytest.mark.parametrize("rows", [1, 2, 4, 13, 16])
@pytest.mark.parametrize(("K", "N"), [(16, 16), (32, 32), (48, 64), (64, 64), (64, 96)])
def test_small_products_do_not_depend_on_their_neighbours(K, N, rows):
    """torch multiplies small matrices by itself, and adds up in another order than oneDNN."""
    for seed in range(20):
        counts = [rows] * 8
        ends, x, w = list(accumulate(counts)), drawn(8 * rows, K, seed=seed), drawn(8, N, K, seed=seed + 50).mT
        found = multiply_rows(x, w, ends, (None, None), torch.bfloat16)
        alone = [multiply(part, w[e], None, torch.bfloat16) for e, part in enumerate(x.split(rows))]
        assert torch.equal(found, torch.cat(alone))
        g = drawn(8 * rows, N, seed=seed + 99)
        for one, g_rows, x_rows in zip(
            multiply_tokens(g, x, ends, (None, None), torch.bfloat16), g.split(rows), x.split(rows)
        ):
            assert torch.equal(one, multiply(g_rows.t(), x_rows, None, torch.bfloat16))


def test_a_product_does_not_depend_on_where_its_operands_lie():
    x, w = drawn(64, 512), drawn(512, 352, seed=1)
    wanted = multiply(x, w, None, torch.bfloat16)
    turned = multiply(x.t().contiguous().t(), w.t().contiguous().t(), None, torch.bfloat16)
    assert torch.equal(turned, wanted)
    assert torch.equal(multiply(x, w.t().contiguous().t(), None, torch.bfloat16), wanted)


@pytest.mark.skipif(not onednn_multiplies(), reason="this torch does not give BF16 products to oneDNN")
def test_neighbours_of_equal_length_share_a_call():
    counts = [5, 5, 0, 3, 3, 3, 5]
    assert min(count for count in counts if count) * K * N > ONEDNN_FROM
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
