"""HiF8 codes, values and amax equal the torch codec's: by arithmetic and by table, at any scale."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from inputs import DTYPES, KINDS, all_bf16, words

from quaver.backends.codecs import tensor_amax
from quaver.backends.native import kernels
from quaver.backends.native.kernels import Want
from quaver.formats import hif8

SCALES = [1.0, 0.0371, 3.0, 1e-30, 1e-44, 1e38]


def assert_equal(x, scale):
    spread = scale.view(-1, 1, 1) if scale.ndim == 1 else scale
    wanted = hif8.quantize(x, spread)
    found = kernels.hif8_quantize(x, scale, want=Want.BOTH)
    assert torch.equal(found.codes, wanted)
    values = hif8.decode(wanted, dtype=torch.bfloat16)
    assert torch.equal(found.values.view(torch.int16), values.view(torch.int16))
    assert kernels.hif8_quantize(x, scale, want=Want.CODES).values is None


@pytest.mark.parametrize("scale", SCALES)
def test_every_bf16_pattern_by_arithmetic_and_by_table(compiled, scale):
    x = all_bf16()
    assert_equal(x, torch.tensor(scale))
    assert_equal(x.repeat(2, 1), torch.tensor(scale))  # 2^17 elements: the table's first size
    assert_equal(x.repeat(3, 1)[:, 1:], torch.tensor(scale))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_shapes(compiled, kind, dtype):
    for seed, shape in enumerate([(1, 1), (33, 47), (300, 500), (0, 5), (3, 40, 65), (2, 0, 3)]):
        assert_equal(KINDS[kind](shape, seed).to(dtype), torch.tensor(0.0371))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_scale_each_expert(compiled, dtype):
    x = KINDS["wide"]((4, 33, 64), 0).to(dtype)
    assert_equal(x, torch.tensor([1.0, 0.01, 1e-20, 3.0]))
    assert_equal(x.transpose(-1, -2), torch.tensor([1.0, 0.01, 1e-20, 3.0]))


@pytest.mark.parametrize("power", [-140, -61, -60, -1, 0, 59, 60, 100])
def test_quotients_at_the_edge_of_another_code(compiled, power):
    """FP32 numbers next to edge * scale: a quotient that is off by its last bit comes out as another code."""
    generator = torch.Generator().manual_seed(power + 200)
    edges = torch.exp2(torch.arange(-25.0, 17)).unsqueeze(1) * (1 + torch.arange(16) / 16)  # five bits: all that count
    steps = torch.arange(-3, 4, dtype=torch.int32)
    for _ in range(40):
        scale = ((1 + torch.rand((), generator=generator)) * 2.0**power).clamp(min=2.0**-149)
        near = (edges.double() * scale).float().view(torch.int32).reshape(-1, 1) + steps
        assert_equal(near.view(torch.float32), scale)
        assert_equal(-near.view(torch.float32), scale)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    bits=hnp.arrays(np.uint32, st.tuples(st.integers(1, 5), st.integers(1, 70))),
    scale=st.floats(min_value=2.0**-149, max_value=2.0**127, width=32),
)
def test_drawn_words(compiled, bits, scale):
    x = torch.from_numpy(bits.view(np.int32).copy()).view(torch.float32)
    assert_equal(x, torch.tensor(scale))
    assert_equal(x.bfloat16(), torch.tensor(scale))


@pytest.mark.parametrize("shape", [(64, 64), (33, 47), (3, 40, 65), (512, 96), (0, 4)])
def test_decoding(compiled, shape):
    codes = torch.randint(0, 256, shape, dtype=torch.uint8)
    wanted = hif8.decode(codes, dtype=torch.bfloat16).view(torch.int16)
    assert torch.equal(kernels.hif8_decode(codes).view(torch.int16), wanted)
    turned = kernels.hif8_decode_transposed(codes)
    assert torch.equal(turned.view(torch.int16), wanted.transpose(-1, -2).contiguous())


@pytest.mark.parametrize("dtype", DTYPES)
def test_amax(compiled, dtype):
    for shape in [(1, 1), (33, 47), (300, 500), (4, 33, 64), (0, 5), (3, 0, 4)]:
        x = KINDS["wide"](shape, 1).to(dtype)
        dims = tuple(range(1, 3)) if x.ndim == 3 else (0, 1)
        wanted = x.abs().amax(dims).float() if x.numel() else torch.zeros(shape[:1] if x.ndim == 3 else ())
        assert torch.equal(tensor_amax(x), wanted)
    x = words((3, 40, 64), 2).to(dtype)
    x[1] = x[1].nan_to_num(1.0, 2.0, 3.0)
    found = kernels.amax(x)
    assert found[0].isnan()
    assert found[1] == x[1].abs().amax()
    x = torch.ones(40, 40, dtype=dtype)
    x[39, 39] = -math.inf
    assert kernels.amax(x) == math.inf


@pytest.mark.parametrize("format_max", [15.0, 224.0])
def test_scales(compiled, format_max):
    amaxes = [0.0, 1e-45, 1e-40, 1e-30, 1.0, 3.7, 3e38, math.inf, math.nan]
    x = torch.zeros(len(amaxes), 5, 7)
    x[:, 3, 2] = -torch.tensor(amaxes)
    wanted = hif8.scale_from_amax(torch.tensor(amaxes), format_max)
    assert torch.equal(kernels.hif8_scales(x, format_max), wanted)
    for one, scale in zip(x, wanted):
        found = kernels.hif8_scales(one, format_max)
        assert found.ndim == 0
        assert found == scale
    assert torch.equal(kernels.hif8_scales(torch.zeros(3, 0, 4), format_max), torch.ones(3))
