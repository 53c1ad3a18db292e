"""MXFP8 over shapes, axes, strides, shards and groups: all the same blocks."""

from __future__ import annotations

import mx_oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quaver.formats import _common, _mx_blocks, mxfp8

RULES = ("floor", "rceil")


def wild(*shape: int, seed: int = 0) -> torch.Tensor:
    """Numbers over many magnitudes, with zeros, subnormals, Inf and NaN here and there."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * 2.0 ** torch.randint(-20, 20, shape, generator=generator)
    dice = torch.randint(0, 1000, shape, generator=generator)
    x[dice == 0], x[dice == 1], x[dice == 2] = torch.inf, torch.nan, 2.0**-140
    return torch.where((dice > 10) & (dice < 60), 0.0, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "shape",
    [(1,), (31,), (32,), (33,), (64, 96), (40, 70), (3, 33, 64), (1, 32, 5), (1, 1, 90), (2, 64, 5, 7)],
)
def test_every_axis(shape, dtype):
    x = wild(*shape).to(dtype)
    for axis in range(-x.dim(), x.dim()):
        for rule in RULES:
            codes, scales = mxfp8.quantize(x, axis=axis, scale_rule=rule)
            along_last = x.movedim(axis, -1).contiguous()
            expected_codes, expected_scales = mx_oracle.as_torch(mx_oracle.quantize(along_last, rule))
            assert codes.is_contiguous()
            assert scales.is_contiguous()
            assert codes.shape == x.shape
            assert torch.equal(codes, expected_codes.movedim(-1, axis))
            assert torch.equal(scales, expected_scales.movedim(-1, axis))
            values = mxfp8.dequantize(codes, scales, axis=axis)
            expected = mxfp8.dequantize(expected_codes, expected_scales).movedim(-1, axis)
            assert values.is_contiguous()
            torch.testing.assert_close(values, expected, rtol=0, atol=0, equal_nan=True)
            assert torch.equal(mxfp8.encode_with_scales(x, scales, axis=axis), codes)


def test_strides_do_not_matter():
    base = wild(64, 96, 6)
    for view in (
        base.permute(2, 0, 1),
        base[::2, 1::3],
        base[..., 2],
        base.mT,
        base[:, :, ::2].expand(64, 96, 3),
    ):
        for x in (view, view.clone().requires_grad_(), view.bfloat16()):
            solid = x.detach().contiguous()
            for axis in range(x.dim()):
                for got, expected in zip(mxfp8.quantize(x, axis=axis), mxfp8.quantize(solid, axis=axis)):
                    assert torch.equal(got, expected)
                    assert not got.requires_grad
    codes, scales = mxfp8.quantize(base, axis=1)
    turned = mxfp8.dequantize(codes.permute(2, 1, 0), scales.permute(2, 1, 0), axis=1)
    torch.testing.assert_close(
        turned, mxfp8.dequantize(codes, scales, axis=1).permute(2, 1, 0), rtol=0, atol=0, equal_nan=True
    )


def test_pieces_and_host_looks_change_nothing(monkeypatch):
    x, ends = wild(130, 70), torch.tensor([33, 33, 130])
    ones_ahead = wild(1, 1, 32, 200)

    def everything():
        out = [*mxfp8.quantize(x), *mxfp8.quantize(x, axis=0), *mxfp8.quantize_groups(x, ends)]
        out += [*mxfp8.quantize(ones_ahead), *mxfp8.quantize(ones_ahead, axis=2)]
        out.append(mxfp8.dequantize(out[0], out[1]).view(torch.int32))
        return [*out, mxfp8.encode_with_scales(x, torch.full((130, 3), 127, dtype=torch.uint8))]

    whole = everything()
    monkeypatch.setattr(_common, "_PIECE_NUMEL", 100)
    parts = everything()
    monkeypatch.setattr(_mx_blocks, "host_amax", lambda x: None)  # as on an accelerator
    blind = everything()
    for a, b, c in zip(whole, parts, blind):
        assert torch.equal(a, b)
        assert torch.equal(a, c)


@pytest.mark.parametrize(
    ("shape", "axis", "scale_shape"),
    [((0,), 0, (0,)), ((0, 64), 1, (0, 2)), ((0, 64), 0, (0, 64)), ((64, 0), 0, (2, 0)), ((5, 0), 1, (5, 0))],
)
def test_empty(shape, axis, scale_shape):
    for dtype in (torch.float32, torch.bfloat16):
        codes, scales = mxfp8.quantize(torch.empty(shape, dtype=dtype), axis=axis)
        assert (codes.shape, codes.dtype) == (shape, torch.uint8)
        assert (scales.shape, scales.dtype) == (scale_shape, torch.uint8)
        assert mxfp8.dequantize(codes, scales, axis=axis).shape == shape
        assert mxfp8.encode_with_scales(torch.empty(shape, dtype=dtype), scales, axis=axis).shape == shape
        assert mxfp8.amax_bits(torch.empty(shape, dtype=dtype), axis=axis).shape == scale_shape


def test_meta_tensors_give_shapes():
    codes, scales = mxfp8.quantize(torch.empty(64, 70, device="meta"))
    assert (codes.shape, scales.shape, codes.device.type) == ((64, 70), (64, 3), "meta")


def test_a_block_spread_over_shards_has_one_exponent():
    x = wild(4, 64)
    left, right = x[:, :40], x[:, 40:]  # the second block of each row lies on both
    bits_left, bits_right = mxfp8.amax_bits(left), mxfp8.amax_bits(right)
    assert bits_left.shape == (4, 2)
    shared = torch.maximum(bits_left[:, 1], bits_right[:, 0])
    bits = torch.stack([bits_left[:, 0], shared], 1)
    for rule in RULES:
        scales = mxfp8.exponents_from_amax_bits(bits, rule)
        codes = torch.cat(
            [mxfp8.encode_with_scales(left, scales), mxfp8.encode_with_scales(right, scales[:, 1:])], 1
        )
        expected_codes, expected_scales = mxfp8.quantize(x, scale_rule=rule)
        assert torch.equal(scales, expected_scales)
        assert torch.equal(codes, expected_codes)


def check_groups(x_SK, sizes, rule):
    ends = torch.tensor(sizes, dtype=torch.int64).cumsum(0)
    codes, scales = mxfp8.quantize_groups(x_SK, ends, scale_rule=rule)
    each = [mxfp8.quantize(part, axis=0, scale_rule=rule) for part in x_SK.split(sizes)]
    assert codes.is_contiguous()
    assert torch.equal(codes, torch.cat([c for c, _ in each]))
    assert torch.equal(scales, torch.cat([s for _, s in each]))
    assert (
        mxfp8.group_scale_ends(ends).tolist()
        == torch.tensor([s.shape[0] for _, s in each]).cumsum(0).tolist()
    )
    for dtype in (torch.float32, torch.bfloat16):
        got = mxfp8.dequantize_groups(codes, scales, ends, dtype)
        expected = torch.cat([mxfp8.dequantize(c, s, axis=0, dtype=dtype) for c, s in each])
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "sizes", [(0, 1, 31, 32, 33), (33, 0, 0, 32), (64, 32), (0, 0), (5,), (32,), (31, 1), (0, 65, 0)]
)
def test_groups_equal_each_group_alone(sizes, dtype, rule):
    check_groups(wild(sum(sizes), 40).to(dtype), sizes, rule)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from([0, 1, 2, 31, 32, 33, 63, 64, 65]), min_size=1, max_size=9),
    st.integers(1, 5),
    st.sampled_from(RULES),
)
def test_any_groups_equal_each_group_alone(sizes, width, rule):
    check_groups(wild(sum(sizes), width, seed=sum(sizes)), sizes, rule)


def test_groups_without_columns_or_groups():
    codes, scales = mxfp8.quantize_groups(torch.empty(33, 0), torch.tensor([33]))
    assert (codes.shape, scales.shape) == ((33, 0), (2, 0))
    codes, scales = mxfp8.quantize_groups(torch.empty(0, 7), torch.empty(0, dtype=torch.int64))
    assert (codes.shape, scales.shape) == ((0, 7), (0, 7))
    assert mxfp8.dequantize_groups(codes, scales, torch.empty(0, dtype=torch.int64)).shape == (0, 7)


def test_rejects():
    for dtype in (torch.float16, torch.float64, torch.int8, torch.float8_e4m3fn):
        with pytest.raises(TypeError, match="float32 or bfloat16"):
            mxfp8.quantize(torch.zeros(32).to(dtype))
    codes, scales = mxfp8.quantize(torch.zeros(4, 64))
    with pytest.raises(ValueError, match="0-d"):
        mxfp8.quantize(torch.tensor(1.0))
    with pytest.raises(IndexError, match="axis 2"):
        mxfp8.quantize(torch.zeros(4, 64), axis=2)
    for bad in ("ceil", "even", None):
        for x in (torch.zeros(4, 64), torch.zeros(0, 64)):
            with pytest.raises(ValueError, match="scale_rule"):
                mxfp8.quantize(x, scale_rule=bad)
    with pytest.raises(ValueError, match=r"expected \(4, 2\)"):
        mxfp8.dequantize(codes, scales[:, :1])
    with pytest.raises(ValueError, match=r"expected \(1, 64\)"):
        mxfp8.dequantize(codes, scales, axis=0)
    with pytest.raises(ValueError, match=r"expected \(4, 2\)"):
        mxfp8.encode_with_scales(torch.zeros(4, 64), scales[0])
    with pytest.raises(TypeError, match="uint8"):
        mxfp8.dequantize(codes.to(torch.int32), scales)
    with pytest.raises(TypeError, match="uint8"):
        mxfp8.dequantize(codes, scales.to(torch.int32))
    with pytest.raises(TypeError, match="gives float32 or bfloat16"):
        mxfp8.dequantize(codes, scales, dtype=torch.float16)
    with pytest.raises(TypeError, match="int32"):
        mxfp8.exponents_from_amax_bits(torch.zeros(3))
    x = torch.zeros(40, 8)
    for ends in ([30], [41], [50, 40], [-1, 40]):
        with pytest.raises(ValueError, match="group ends"):
            mxfp8.quantize_groups(x, torch.tensor(ends))
    with pytest.raises(ValueError, match="no groups"):
        mxfp8.quantize_groups(x, torch.empty(0, dtype=torch.int64))
    with pytest.raises(TypeError, match="int64"):
        mxfp8.quantize_groups(x, torch.tensor([40], dtype=torch.int32))
    with pytest.raises(ValueError, match=r"\[S, K\]"):
        mxfp8.quantize_groups(x[0], torch.tensor([8]))
    codes, scales = mxfp8.quantize_groups(x, torch.tensor([8, 40]))
    with pytest.raises(ValueError, match=r"expected \(2, 8\)"):
        mxfp8.dequantize_groups(codes, scales[:1], torch.tensor([8, 40]))
