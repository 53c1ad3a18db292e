"""MXFP8 against its vectors and ml-dtypes: scales, codes, values."""

from __future__ import annotations

import ml_dtypes
import mx_oracle
import numpy as np
import pytest
import torch
from format_vectors import GOLDEN, sqnr_db, tensor_from_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from quaver.formats import mxfp8

RULES = ("floor", "rceil")


@pytest.fixture(scope="module")
def vectors():
    with np.load(GOLDEN / "mxfp8_vectors.npz") as file:
        return dict(file)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("tag", ["fp32", "bf16"])
def test_vectors(vectors, tag, rule):
    x = tensor_from_bits(vectors[f"in_{tag}_bits"])
    expected_scales = vectors[f"{tag}_{rule}_exact_scale"].copy()
    expected_codes = vectors[f"{tag}_{rule}_exact_data"].copy()
    assert len(x) == 1103

    # Our policy: any NaN or Inf gives byte 255 and codes 0. The vectors agree on blocks with NaN, and carry
    # other bytes where there is Inf alone: these rows (rounding to BF16 adds one to them), and no others.
    inf_alone = (x.isinf().any(1) & ~x.isnan().any(1)).numpy()
    assert set(vectors["names"][inf_alone]) == {"one_inf", "neg_inf"} | (
        {"fp32_max"} if tag == "bf16" else set()
    )
    assert (expected_scales[inf_alone] != 255).all()
    broken = ~x.isfinite().all(1).numpy()
    assert (expected_scales[broken & ~inf_alone] == 255).all()
    expected_scales[broken], expected_codes[broken] = 255, 0

    for codes, scales in (
        mxfp8.quantize(x, scale_rule=rule),
        tuple(t.t() for t in mxfp8.quantize(x.t().contiguous(), axis=0, scale_rule=rule)),
        tuple(t.t() for t in mxfp8.quantize(x.t(), axis=-2, scale_rule=rule)),
    ):
        np.testing.assert_array_equal(scales.squeeze(1).numpy(), expected_scales)
        np.testing.assert_array_equal(codes.numpy(), expected_codes)
    torchao = vectors[f"{tag}_{rule}_agree"] & ~broken
    assert torchao.sum() > 1000
    np.testing.assert_array_equal(codes.numpy()[torchao], vectors[f"{tag}_{rule}_data"][torchao])


def test_scale_bytes_by_rule(vectors):
    for tag in ("fp32", "bf16"):
        x = tensor_from_bits(vectors[f"in_{tag}_bits"])
        finite = x.isfinite().all(1).numpy()
        bits = mxfp8.amax_bits(x)
        assert bits.dtype == torch.int32
        for rule, column in (("floor", "rule_floor_scale"), ("rceil", "rule_rceil_exact_scale")):
            scales = mxfp8.exponents_from_amax_bits(bits, rule).squeeze(1).numpy()
            np.testing.assert_array_equal(scales[finite], vectors[f"{tag}_{column}"][finite])


@pytest.mark.parametrize("rule", RULES)
def test_scale_of_every_bf16_magnitude(all_bf16, rule):
    x = all_bf16[:, None]
    codes, scales = mxfp8.quantize(x, scale_rule=rule)
    expected_codes, expected_scales = mx_oracle.quantize(x, rule)
    np.testing.assert_array_equal(scales.numpy(), expected_scales)
    np.testing.assert_array_equal(codes.numpy(), expected_codes)


@pytest.mark.parametrize(
    ("amax", "floor", "rceil"),
    [
        (1.0, 119, 119), (448.0, 127, 127), (np.nextafter(np.float32(448), np.float32(999)), 127, 128),
        (np.nextafter(np.float32(512), np.float32(0)), 127, 128), (512.0, 128, 128), (0.0, 0, 0),
        (2.0**-149, 0, 0), (2.0**-118, 1, 1), (np.float32(3.4028235e38), 246, 247), (np.inf, 255, 255),
        (np.nan, 255, 255),
    ],
)  # fmt: skip
def test_known_scale_bytes(amax, floor, rceil):
    bits = torch.tensor([amax], dtype=torch.float32).view(torch.int32)
    assert mxfp8.exponents_from_amax_bits(bits, "floor").tolist() == [floor]
    assert mxfp8.exponents_from_amax_bits(bits, "rceil").tolist() == [rceil]


@pytest.mark.parametrize("rule", RULES)
def test_random_bits_equal_ml_dtypes(random_fp32_bits, rule):
    # Random exponents leave most of a block at zero; narrowing them around the first element does not.
    words = random_fp32_bits[: 2000 * 32].view(torch.int32).view(-1, 32)
    exponent = (words[:, :1] >> 23 & 0xFF) - (words >> 23 & 0xF)
    near = (words & ~0x7F800000) | exponent.clamp_min(0) << 23
    for x in (words.view(torch.float32), near.view(torch.float32), near.view(torch.float32).bfloat16()):
        codes, scales = mxfp8.quantize(x, scale_rule=rule)
        expected_codes, expected_scales = mx_oracle.quantize(x, rule)
        np.testing.assert_array_equal(scales.numpy(), expected_scales)
        np.testing.assert_array_equal(codes.numpy(), expected_codes)


@settings(max_examples=150, deadline=None)
@given(
    hnp.arrays(
        np.float32, hnp.array_shapes(max_dims=3, min_side=0, max_side=70), elements=st.floats(width=32)
    ),
    st.sampled_from(RULES),
    st.booleans(),
)
def test_quantize_equals_ml_dtypes(x, rule, narrow):
    tensor = torch.from_numpy(x).bfloat16() if narrow else torch.from_numpy(x)
    codes, scales = mxfp8.quantize(tensor, scale_rule=rule)
    expected_codes, expected_scales = mx_oracle.quantize(tensor, rule)
    np.testing.assert_array_equal(scales.numpy(), expected_scales)
    np.testing.assert_array_equal(codes.numpy(), expected_codes)


def test_every_code_at_every_scale_byte():
    codes = np.tile(np.arange(256, dtype=np.uint8), (256, 1))
    scales = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 8, axis=1)
    exact = mx_oracle.dequantize(codes, scales)
    assert np.isnan(exact[255]).all()
    for dtype, rounded in ((torch.float32, np.float32), (torch.bfloat16, ml_dtypes.bfloat16)):
        with np.errstate(over="ignore"):
            expected = exact.astype(rounded).astype(np.float64)
        got = mxfp8.dequantize(*mx_oracle.as_torch((codes, scales)), dtype=dtype)
        assert got.dtype == dtype
        np.testing.assert_array_equal(got.double().numpy(), expected)
        signs = np.signbit(got.float().numpy()) == np.signbit(exact)
        assert signs[~np.isnan(exact)].all()  # -0 stays -0


def test_bf16_values_are_exact_and_normal_from_byte_10_to_246():
    codes = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
    scales = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 8)
    wide = mxfp8.dequantize(codes, scales)
    narrow = mxfp8.dequantize(codes, scales, dtype=torch.bfloat16)
    exact = ((narrow.float() == wide) | wide.isnan()).all(1)
    assert exact.nonzero().flatten().tolist()[0] == 3
    assert exact[3:247].all()
    magnitude = wide.abs()
    has_subnormal = ((magnitude > 0) & (magnitude < 2.0**-126)).any(1)
    assert has_subnormal.nonzero().flatten().tolist() == list(range(10))
    # Beyond 246 the largest codes leave the range; there is no finite value to be exact about.
    finite_codes = codes[0] & 0x7F != 0x7F
    assert wide[:247, finite_codes].isfinite().all()
    assert wide[247].isinf().any()


@pytest.mark.parametrize("byte", [0, 1, 5, 100, 127, 200, 246, 247, 253, 254])
def test_encode_with_any_scale_byte(byte, random_fp32_bits):
    # Values around 2^(byte - 127), so that codes of all sizes appear, and plain random bits.
    words = random_fp32_bits[:64_000].view(torch.int32)
    exponent = (byte - 12 + (words >> 23 & 31)).clamp(0, 254)
    near = ((words & ~0x7F800000) | exponent << 23).view(torch.float32)
    for x in (near, random_fp32_bits[:64_000]):
        x = x[x.isfinite()]
        scales = torch.full((-(-x.numel() // 32),), byte, dtype=torch.uint8)
        expected = mx_oracle.encode(x.double().numpy(), np.full(x.shape, byte - 127))
        np.testing.assert_array_equal(mxfp8.encode_with_scales(x, scales).numpy(), expected)
    assert len(set(expected.tolist())) > 2


def test_scales_that_overlooked_non_finite_elements_hide_nothing():
    x = torch.ones(3, 32)
    x[0, 0], x[1, 0], x[2, 0] = torch.inf, -torch.inf, torch.nan
    scales = torch.full((3, 1), 119, dtype=torch.uint8)
    codes = mxfp8.encode_with_scales(x, scales)
    assert codes[:2, 0].tolist() == [0x7F, 0xFF]
    assert (codes[:, 1:] == 0x78).all()  # 256 = 1 / 2^-8
    assert mxfp8.dequantize(codes, scales)[:, 0].isnan().all()
    assert (mxfp8.encode_with_scales(x, torch.full_like(scales, 255)) == 0).all()


def test_non_finite_blocks():
    x = torch.ones(4, 64)
    x[0, 3], x[1, 35], x[2, 63] = torch.nan, torch.inf, -torch.inf
    for dtype in (torch.float32, torch.bfloat16):
        for rule in RULES:
            codes, scales = mxfp8.quantize(x.to(dtype), scale_rule=rule)
            assert (scales == 255).tolist() == [[True, False], [False, True], [False, True], [False, False]]
            broken = (scales == 255).repeat_interleave(32, 1)
            assert (codes[broken] == 0).all()
            assert (codes[~broken] == 0x78).all()
            values = mxfp8.dequantize(codes, scales)
            assert torch.equal(values.isnan(), broken)
            assert (values[~broken] == 1).all()


def test_zero_blocks_keep_their_signs():
    x = torch.zeros(32)
    x[::2] = -0.0
    codes, scales = mxfp8.quantize(x)
    assert scales.tolist() == [0]
    assert codes.tolist() == [0x80, 0x00] * 16
    assert torch.equal(mxfp8.dequantize(codes, scales).signbit(), x.signbit())


@pytest.mark.parametrize(("rule", "expected_db"), [("floor", 30.65), ("rceil", 31.53)])
def test_noise_on_a_normal_distribution(rule, expected_db):
    x = torch.randn(2048, 1024, generator=torch.Generator().manual_seed(0))
    for axis in (0, 1):
        codes, scales = mxfp8.quantize(x, axis=axis, scale_rule=rule)
        assert sqnr_db(x, mxfp8.dequantize(codes, scales, axis=axis)) == pytest.approx(expected_db, abs=0.03)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("rule", RULES)
def test_cuda_equals_cpu(vectors, random_fp32_bits, rule):
    for x in (
        tensor_from_bits(vectors["in_fp32_bits"]),
        tensor_from_bits(vectors["in_bf16_bits"]),
        random_fp32_bits[:320_000].view(-1, 32),
    ):
        codes, scales = mxfp8.quantize(x, scale_rule=rule)
        codes_cuda, scales_cuda = mxfp8.quantize(x.cuda(), scale_rule=rule)
        assert torch.equal(codes_cuda.cpu(), codes)
        assert torch.equal(scales_cuda.cpu(), scales)
        values = mxfp8.dequantize(codes_cuda, scales_cuda).cpu()
        torch.testing.assert_close(values, mxfp8.dequantize(codes, scales), rtol=0, atol=0, equal_nan=True)
