"""What the experts' kernels compute while they quantise has the bits of torch's own operators."""

from __future__ import annotations

import pytest
import torch
from inputs import all_bf16, words

from quaver.backends import QuantizationRole, ReferenceBackend, ScalingSpec
from quaver.backends.native import experts
from quaver.backends.native.kernels import Want
from quaver.backends.sources import GatheredRows, ScaledRows, SwiGLU, SwiGLUGradient

ROWS = 97
ENDS = torch.tensor([0, 31, 64, 64, 97])


def drawn(*shape, seed=0, scale=1.0):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale
    return x.bfloat16()


def every_gate(width, seed):
    """h = [gate, up] in which every BF16 pattern is a gate."""
    gate = all_bf16().reshape(-1, width)
    return torch.cat([gate, drawn(*gate.shape, seed=seed)], 1)


def sources():
    index = torch.randint(0, 50, (ROWS,), generator=torch.Generator().manual_seed(1))
    weight = torch.rand(ROWS, generator=torch.Generator().manual_seed(2))
    h = drawn(ROWS, 2 * 320, seed=3, scale=4.0)
    h[5, 7], h[40, 400], h[41, 3] = float("nan"), float("inf"), 0.0
    h[60:70] = 0.0
    return {
        "gathered": GatheredRows(drawn(50, 129, seed=4), index),
        "gathered words": GatheredRows(words((50, 96), 5).bfloat16(), index),
        "scaled": ScaledRows(drawn(50, 129, seed=6, scale=1e-3), index, weight),
        "scaled words": ScaledRows(words((50, 96), 7).bfloat16(), index, weight),
        "swiglu": SwiGLU(h),
        "swiglu gradient": SwiGLUGradient(drawn(ROWS, 320, seed=8, scale=1e-4), h),
        "a width that torch cuts": SwiGLU(drawn(ROWS, 2 * 77, seed=9)),
        "its gradient": SwiGLUGradient(drawn(ROWS, 77, seed=9), drawn(ROWS, 2 * 77, seed=10)),
        "fp32": SwiGLU(h.float()),
    }


SPECS = {
    "floor": ScalingSpec("mxfp8_e4m3", block=32, scale_rule="floor"),
    "rceil": ScalingSpec("mxfp8_e4m3", block=32, scale_rule="rceil"),
    "hif8": ScalingSpec("hif8", format_max=224.0),
}


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("name", sources())
@pytest.mark.parametrize("role", [QuantizationRole.INPUT_FWD, QuantizationRole.GRAD_OUTPUT])
def test_a_source_quantises_as_its_tensor(paths, name, spec, role):
    source, backend = sources()[name], ReferenceBackend()
    paths("off")
    wanted = backend.quantize_dual(source.tensor(), spec=SPECS[spec], role=role, group_list=ENDS)
    paths("native")
    found = backend.quantize_dual(source, spec=SPECS[spec], role=role, group_list=ENDS)
    alone = [
        backend.quantize(source, spec=SPECS[spec], role=role, orientation=orientation, group_list=ENDS)
        for orientation in ("row", "col")
    ]
    codec = backend.codec(SPECS[spec].format)
    for one, other, third in zip(found, wanted, alone):
        assert torch.equal(one.data, other.data)
        assert torch.equal(one.scale, other.scale)
        assert torch.equal(third.data, other.data)
        assert (one.logical_dtype, one.orientation) == (other.logical_dtype, other.orientation)
        if one.values is not None:
            paths("off")
            plain = codec.factors(other, torch.bfloat16, ENDS if one.orientation == "col" else None).values
            assert torch.equal(one.values.nan_to_num(7.0), plain.nan_to_num(7.0))
            paths("native")


def test_silu_and_its_gradient_over_every_pattern(compiled):
    assert experts._sigmoids() is not None
    h = every_gate(256, 1)
    filled, amax = experts.fill(SwiGLU(h))
    wanted = SwiGLU(h).tensor()
    assert torch.equal(filled.nan_to_num(7.0), wanted.nan_to_num(7.0))
    assert amax.isnan()
    finite = h.nan_to_num(1.0, 2.0, 3.0)
    assert experts.fill(SwiGLU(finite))[1] == SwiGLU(finite).tensor().abs().amax()
    for seed in range(8):
        source = SwiGLUGradient(drawn(256, 256, seed=seed), every_gate(256, seed + 100))
        assert torch.equal(experts.fill(source)[0].nan_to_num(7.0), source.tensor().nan_to_num(7.0))


@pytest.mark.parametrize("k", [1, 2, 4, 8, 15])
@pytest.mark.parametrize("weighted", [True, False])
def test_combining_sums_in_torchs_order(compiled, k, weighted):
    tokens, cols = 70, 320
    y = drawn(tokens * k, cols, seed=k) * torch.exp2(torch.arange(tokens * k) % 9).bfloat16().unsqueeze(1)
    y[3], y[4] = 0.0, -0.0
    place = torch.randperm(tokens * k).view(tokens, k)
    weight = torch.rand(tokens, k) if weighted else None
    chosen = y[place].float()
    wanted = (chosen * weight.unsqueeze(-1) if weighted else chosen).sum(1).bfloat16()
    found = experts.combine(y, place, weight)
    assert torch.equal(found.view(torch.int16), wanted.view(torch.int16))


def test_dots_are_summed_by_torch(compiled):
    for tokens, k, cols in ((70, 4, 320), (1, 1, 64), (300, 8, 1000)):
        y, g = drawn(tokens * k, cols), drawn(tokens, cols, seed=1)
        place = torch.randperm(tokens * k).view(tokens, k)
        wanted = (y[place].float() * g.float().unsqueeze(1)).sum(-1)
        assert torch.equal(experts.dots(y, place, g), wanted)


def test_a_row_number_beyond_the_rows_is_not_followed(compiled):
    y, place = drawn(8, 64), torch.tensor([[0, 8]])
    assert experts.combine(y, place, None) is None
    assert experts.dots(y, place, drawn(1, 64)) is None
    for bad in (8, -1):
        index = torch.tensor([0, bad])
        assert experts.fill(ScaledRows(y, index, torch.ones(2))) is None
        source = GatheredRows(y, index)
        assert experts.quantize(source, rceil=False, row=Want.CODES, col=None, ends=None) is None


@pytest.mark.parametrize(("dy", "gate"), [(0.54296875, -24.625), (3.390625, 0.0023040771484375)])
def test_the_slope_is_multiplied_from_left_to_right(compiled, dy, gate):
    """Two of the rare values where another order of torch's own factors rounds to another BF16 number."""
    x = torch.full((1, 64), gate).bfloat16()
    source = SwiGLUGradient(torch.full((1, 64), dy).bfloat16(), torch.cat([x, torch.ones_like(x)], 1))
    sigmoid = experts._sigmoids().of[x.view(torch.int16).long() & 0xFFFF]
    rest = 1 + x.double() * (1 - sigmoid).double()
    rest = rest.float() if experts._sigmoids().fused else 1 + x.float() * (1 - sigmoid)
    assert (dy * (sigmoid * rest)).bfloat16()[0, 0] != source.tensor()[0, 0]
    assert torch.equal(experts.fill(source)[0], source.tensor())
