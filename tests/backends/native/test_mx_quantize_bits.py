"""The MXFP8 quantisers equal the torch codec bit for bit: both axes, both rules, groups, strides, every pattern."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from inputs import DTYPES, KINDS, RULES, SHAPES, all_bf16, golden_blocks, strided, words

from quaver.backends.native import kernels
from quaver.backends.native.kernels import Want
from quaver.formats import mxfp8


def same_values(found, codes, scales, axis):
    """BF16 values equal the decoded codes, signs of zeros included; None only where BF16 would lose something."""
    exact = mxfp8.dequantize(codes, scales, axis=axis)
    lossy = (exact.abs() < 2.0**-126) & ((codes & 0x7F) != 0)
    by_scale = ((scales > 0) & (scales < 10)) | (scales > 246)
    if found is None:
        assert lossy.any() or by_scale.any()
        return
    assert not lossy.any()
    assert not by_scale.any()
    assert torch.equal(found.view(torch.int16), exact.bfloat16().view(torch.int16))


def assert_equal(x, rule):
    row, col = kernels.quantize(x, rceil=rule == "rceil", row=Want.BOTH, col=Want.BOTH)
    for found, axis in ((row, -1), (col, -2)):
        codes, scales = mxfp8.quantize(x, axis=axis, scale_rule=rule)
        assert torch.equal(found.scales, scales)
        assert torch.equal(found.codes, codes)
        same_values(found.values, codes, scales, axis)
    alone, nothing = kernels.quantize(x, rceil=rule == "rceil", row=Want.CODES)
    assert nothing is None
    assert alone.values is None
    assert torch.equal(alone.codes, row.codes)
    nothing, alone = kernels.quantize(x, rceil=rule == "rceil", col=Want.CODES)
    assert nothing is None
    assert torch.equal(alone.codes, col.codes)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("tag", ["fp32", "bf16"])
def test_golden_vectors(compiled, tag, rule):
    assert_equal(golden_blocks()[tag], rule)
    assert_equal(golden_blocks()[tag].t().contiguous(), rule)


@pytest.mark.parametrize("rule", RULES)
def test_every_bf16_pattern(compiled, rule):
    x = all_bf16()
    assert_equal(x, rule)
    assert_equal(x.t().contiguous(), rule)  # neighbours of other exponents
    # finite blocks, in which one pattern at a time meets an ordinary maximum
    finite = x[x.isfinite()].view(-1, 1).expand(-1, 32).clone()
    finite[:, 1:] = 1.0
    assert_equal(finite, rule)
    assert_equal(finite.float() * (1 + 2.0**-20), rule)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_shapes(compiled, kind, dtype, rule):
    for seed, shape in enumerate(SHAPES):
        assert_equal(KINDS[kind](shape, seed).to(dtype), rule)


@pytest.mark.parametrize("dtype", DTYPES)
def test_strides(compiled, dtype):
    for shape in ((70, 129), (3, 40, 65)):
        for x in strided(KINDS["ordinary"](shape, 3).to(dtype)).values():
            assert_equal(x, "floor")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    bits=hnp.arrays(np.uint32, st.tuples(st.integers(1, 40), st.integers(1, 70))), rule=st.sampled_from(RULES)
)
def test_drawn_words(compiled, bits, rule):
    x = torch.from_numpy(bits.view(np.int32).copy()).view(torch.float32)
    assert_equal(x, rule)
    assert_equal(x.bfloat16(), rule)


@pytest.mark.parametrize("special", [float("nan"), float("inf"), float("-inf"), -0.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_special_value(compiled, dtype, special):
    x = torch.randn(64, 64, dtype=dtype)
    x[17, 40] = special
    assert_equal(x, "floor")
    (row, col) = kernels.quantize(x, rceil=False, row=Want.BOTH, col=Want.BOTH)
    if special != 0:
        assert row.scales[17].tolist().count(255) == 1
        assert (row.codes[17, 32:] == 0).all()
        assert col.scales[0, 40] == 255
        assert row.values is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "counts", [(0,), (1,), (31, 0, 32, 33, 1), (0, 0, 64), (100, 0), (5, 5, 5, 5, 200, 7)]
)
def test_groups(compiled, counts, kind, dtype):
    x = KINDS[kind]((sum(counts), 70), 1).to(dtype)
    ends = torch.tensor(counts).cumsum(0)
    row, col = kernels.quantize(x, rceil=True, row=Want.BOTH, col=Want.BOTH, ends=ends)
    codes, scales = mxfp8.quantize_groups(x, ends, scale_rule="rceil")
    assert torch.equal(col.scales, scales)
    assert torch.equal(col.codes, codes)
    if col.values is not None:
        assert torch.equal(col.values, mxfp8.dequantize_groups(codes, scales, ends, torch.bfloat16))
    assert torch.equal(row.codes, mxfp8.quantize(x, scale_rule="rceil")[0])


def test_rows_by_index(compiled):
    x = words((50, 96), 5).bfloat16()
    index = torch.tensor([3, 3, 49, 0, 7] * 20)
    ends = torch.tensor([33, 33, 100])
    found = kernels.quantize(x, rceil=False, row=Want.BOTH, col=Want.BOTH, ends=ends, index=index)
    wanted = kernels.quantize(x.index_select(0, index), rceil=False, row=Want.BOTH, col=Want.BOTH, ends=ends)
    for one, other in zip(found, wanted):
        assert torch.equal(one.codes, other.codes)
        assert torch.equal(one.scales, other.scales)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_any_number_of_threads(compiled, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert_equal(KINDS["wide"]((300, 700), 9).bfloat16(), "floor")
        assert_equal(KINDS["ordinary"]((300, 700), 9), "floor")
    finally:
        torch.set_num_threads(before)


def test_strided_ends_and_indices_are_followed_by_value(compiled):
    """A kernel is handed addresses: what lies between the elements of a view must not be read as an end."""
    x = torch.randn(96, 64, generator=torch.Generator().manual_seed(4)).bfloat16()
    ends = torch.tensor([[33, 7], [96, 9]])[:, 0]
    codes, scales = mxfp8.quantize_groups(x, ends.contiguous())
    _, col = kernels.quantize(x, rceil=False, col=Want.CODES, ends=ends)
    assert torch.equal(col.codes, codes)
    assert torch.equal(col.scales, scales)
    assert torch.equal(
        kernels.decode_columns(codes, scales, ends), mxfp8.dequantize_groups(codes, scales, ends, torch.bfloat16)
    )
    index = torch.tensor([[5, 90], [2, 91]])[:, 0]
    row, _ = kernels.quantize(x, rceil=False, row=Want.CODES, index=index)
    assert torch.equal(row.codes, mxfp8.quantize(x[[5, 2]])[0])


def test_results_lie_on_the_cpu_whatever_the_default_device(compiled):
    x = torch.randn(4, 64)
    with torch.device("meta"):
        row, col = kernels.quantize(x, rceil=False, row=Want.BOTH, col=Want.BOTH)
        found = kernels.amax(x)
    assert {t.device.type for t in (*row, *col, found) if t is not None} == {"cpu"}
