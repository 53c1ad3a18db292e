"""Kernels write what they say under any default of torch's, and with any number of threads."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from helpers.experts import grouped_weight
from helpers.policies import FORMATS, policy

from quaver.backends.native import experts, kernels
from quaver.backends.native.kernels import Want
from quaver.backends.sources import GatheredRows, ScaledRows, SwiGLU, SwiGLUGradient
from quaver.low_precision import low_precision_grouped_swiglu

ROWS, COLS = 640, 128  # more elements than a kernel computes without sharing
ENDS = torch.tensor([0, 33, 320, 640])


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32, device="cpu")


@contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def threads(count):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def trained(fmt):
    """Output and gradients of experts, all bits."""
    bound = policy(fmt)
    weights = [
        grouped_weight(drawn(4, 128, 64, seed=1) * 0.05, bound, "gate_up").requires_grad_(),
        grouped_weight(drawn(4, 64, 64, seed=2) * 0.05, bound, "down").requires_grad_(),
    ]
    x = drawn(300, 64).bfloat16().requires_grad_()
    combine = drawn(300, 2, seed=3).requires_grad_()
    index = torch.arange(600).view(300, 2) % 4
    y = low_precision_grouped_swiglu(x, index, combine, *weights, sites=("gate_up", "down"), recipe=bound.recipe)
    y.backward(drawn(300, 64, seed=4).bfloat16() * 1e-3)
    return [y.detach(), x.grad, combine.grad, *(w.grad for w in weights)]


def every_kernel():
    """What each entry point gives, as one list of tensors."""
    x, half = drawn(ROWS, COLS), drawn(ROWS, COLS // 2, seed=1).bfloat16()
    h, index, weight = x.bfloat16(), torch.arange(ROWS).flip(0) // 2, drawn(ROWS, seed=2)
    sources = [GatheredRows(h, index), ScaledRows(h, index, weight), SwiGLU(h), SwiGLUGradient(half, h)]
    place = torch.arange(ROWS).view(ROWS // 4, 4).flip(0).contiguous()
    g = drawn(ROWS // 4, COLS, seed=3).bfloat16()
    found = [experts.combine(h, place, None), experts.combine(h, place, drawn(ROWS // 4, 4)), experts.dots(h, place, g)]
    for source in sources:
        sides = experts.quantize(source, rceil=False, row=Want.BOTH, col=Want.BOTH, ends=ENDS)
        found += [t for side in sides for t in side]
        found += experts.fill(source) if not isinstance(source, GatheredRows) else ()
    for tensor in (x, h, x.view(4, -1, COLS)):
        scale = kernels.hif8_scales(tensor, 15.0)
        coded = kernels.hif8_quantize(tensor, scale, want=Want.BOTH)
        found += [*coded, kernels.amax(tensor), kernels.hif8_decode(coded.codes)]
        found.append(kernels.hif8_decode_transposed(coded.codes))
        row, col = kernels.quantize(tensor, rceil=True, row=Want.BOTH, col=Want.BOTH)
        found += [*row, *col, kernels.decode_rows(row.codes, row.scales)]
        found.append(kernels.decode_columns(col.codes, col.scales))
        if tensor.dim() == 2:
            out = kernels.buffer(tensor.shape, torch.bfloat16)
            assert kernels.pack_into(row.codes, row.scales, columns=False, address=out.data_ptr())
            found.append(out.clone())
            assert kernels.pack_into(col.codes, col.scales, columns=True, address=out.data_ptr())
            found.append(out)
    return found


def assert_same(found, wanted):
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted):
        assert one.dtype is other.dtype
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_default_dtype_is_not_what_kernels_write(compiled, dtype):
    wanted = every_kernel()
    experts._sigmoids.cache_clear()
    with default_dtype(dtype):
        assert_same(every_kernel(), wanted)
    experts._sigmoids.cache_clear()


@pytest.mark.parametrize("fmt", FORMATS)
def test_experts_under_another_default_dtype(compiled, fmt):
    wanted = trained(fmt)
    with default_dtype(torch.bfloat16):
        assert_same(trained(fmt), wanted)


def test_the_default_device_is_not_where_kernels_write(compiled):
    h, place = drawn(8, 128).bfloat16(), torch.arange(8).view(4, 2)
    g = drawn(4, 128, seed=1).bfloat16()

    def found():
        return [experts.combine(h, place, None), experts.dots(h, place, g), *experts.fill(SwiGLU(h))]

    wanted = found()
    experts._sigmoids.cache_clear()
    with torch.device("meta"):
        assert_same(found(), wanted)


@pytest.mark.parametrize("count", [2, 3, 5])
def test_threads_share_the_work_and_give_the_same_bits(compiled, count):
    with threads(1):
        wanted = every_kernel()
    with threads(count):
        assert_same(every_kernel(), wanted)


@pytest.mark.parametrize("tokens", [2, 5])
def test_a_wide_row_by_itself_is_summed_as_in_company(compiled, tokens):
    """torch shares one long sum among threads, and adds up in another order then."""
    y, g = drawn(tokens, 140_000).bfloat16(), drawn(tokens, 140_000, seed=1).bfloat16()
    place = torch.arange(tokens).view(tokens, 1)
    for count in (1, 2, 3):
        with threads(count):
            found = experts.dots(y, place, g)
            wanted = (y[place].float() * g.float().unsqueeze(1)).sum(-1)
            assert found is None or torch.equal(found, wanted)
    with threads(1):
        assert experts.dots(y, place, g) is not None
