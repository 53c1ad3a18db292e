"""HiF8 against its vectors, en-dtypes and the format's own arithmetic."""

from __future__ import annotations

import math

import en_dtypes
import numpy as np
import pytest
import torch
from format_vectors import GOLDEN, hex_bytes, hex_words, read_csv, tensor_from_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from quaver.formats import _common, hif8

ALL_CODES = torch.arange(256, dtype=torch.uint8)


def en_codes(x: np.ndarray) -> np.ndarray:
    """Ties away, overflow to Inf, by en-dtypes."""
    with np.errstate(all="ignore"):
        return x.astype(en_dtypes.hifloat8).view(np.uint8)


def saturated(codes: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Codes of overflow mode "inf" turned into those of "saturate": finite inputs stop at 2^15."""
    finite_overflow = np.isfinite(x) & ((codes & 0x7F) == 0x6F)
    return np.where(finite_overflow, codes - 1, codes)


def test_decode_equals_vectors_bit_for_bit():
    fields = read_csv("hif8_decode_fields.csv")
    assert hex_bytes(fields["code_hex"]).tolist() == list(range(256))
    expected = hex_words(fields["fp32_bits_hex"])
    got = hif8.decode(ALL_CODES)
    assert got.dtype == torch.float32
    is_nan = np.arange(256) == 0x80
    np.testing.assert_array_equal(got.view(torch.int32).numpy().view(np.uint32)[~is_nan], expected[~is_nan])
    assert math.isnan(got[0x80])
    plain = read_csv("hif8_decode.csv")
    np.testing.assert_array_equal(got.numpy(), np.array([float(v) for v in plain["value"]], dtype=np.float32))


def test_decode_known_values():
    known = {0x00: 0.0, 0x01: 2.0**-22, 0x08: 1.0, 0x2F: 15.0, 0x4F: 224.0, 0x6E: 2.0**15, 0x6F: math.inf}
    for code, value in known.items():
        assert hif8.decode(torch.tensor(code, dtype=torch.uint8)).item() == value
    values = hif8.decode(ALL_CODES)
    assert values.isfinite().sum() == 253


def test_decode_to_bfloat16_is_exact():
    wide, narrow = hif8.decode(ALL_CODES), hif8.decode(ALL_CODES, dtype=torch.bfloat16)
    assert narrow.dtype == torch.bfloat16
    torch.testing.assert_close(narrow.float(), wide, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(hif8.decode_table(torch.bfloat16, "cpu").view(torch.int16), narrow.view(torch.int16))


def test_every_code_survives_decode_and_encode():
    for overflow in ("saturate", "inf"):
        assert torch.equal(hif8.encode(hif8.decode(ALL_CODES), overflow=overflow), ALL_CODES)
        assert torch.equal(
            hif8.encode(hif8.decode(ALL_CODES, dtype=torch.bfloat16), overflow=overflow), ALL_CODES
        )


def test_encode_vectors_overflow_to_inf():
    table = read_csv("hif8_encode.csv")
    x = tensor_from_bits(hex_words(table["fp32_bits_hex"]))
    assert len(x) == 4498
    np.testing.assert_array_equal(hif8.encode(x, overflow="inf").numpy(), hex_bytes(table["code_hex"]))
    modes = read_csv("hif8_encode_modes.csv")
    assert modes["fp32_bits_hex"] == table["fp32_bits_hex"]
    np.testing.assert_array_equal(hex_bytes(modes["ta_inf"]), hex_bytes(table["code_hex"]))


def test_encode_vectors_saturating():
    modes = read_csv("hif8_encode_modes.csv")
    x = tensor_from_bits(hex_words(modes["fp32_bits_hex"]))
    expected = hex_bytes(modes["ta_saturate"])
    # The vectors hide what is not finite; ours keep it. These rows, and no others, differ.
    nan, inf = x.isnan().numpy(), x.isinf().numpy()
    assert nan.sum() == 9
    assert inf.sum() == 2
    assert (expected[nan] == 0x00).all()
    assert sorted(expected[inf]) == [0x6E, 0xEE]
    expected[nan] = 0x80
    expected[inf] += 1
    np.testing.assert_array_equal(hif8.encode(x).numpy(), expected)
    np.testing.assert_array_equal(hif8.encode(x, overflow="saturate").numpy(), expected)


def test_every_bf16_pattern(all_bf16):
    expected = np.load(GOLDEN / "hif8_encode_bf16_all.npy")
    np.testing.assert_array_equal(hif8.encode(all_bf16, overflow="inf").numpy(), expected)
    saturating = saturated(expected, all_bf16.float().numpy())
    np.testing.assert_array_equal(hif8.encode(all_bf16).numpy(), saturating)
    # FP32 words take another route to the same codes.
    np.testing.assert_array_equal(hif8.encode(all_bf16.float(), overflow="inf").numpy(), expected)
    np.testing.assert_array_equal(hif8.encode(all_bf16.float()).numpy(), saturating)


def test_random_fp32_bits_equal_en_dtypes(random_fp32_bits):
    x = random_fp32_bits.numpy()
    # en-dtypes sees the NaN payloads through numpy; what a NaN gives is fixed anyway.
    expected = np.where(np.isnan(x), 0x80, en_codes(x))
    np.testing.assert_array_equal(hif8.encode(random_fp32_bits, overflow="inf").numpy(), expected)
    np.testing.assert_array_equal(hif8.encode(random_fp32_bits).numpy(), saturated(expected, x))


@settings(max_examples=200, deadline=None)
@given(hnp.arrays(np.float32, hnp.array_shapes(max_dims=4, max_side=9), elements=st.floats(width=32)))
def test_encode_equals_en_dtypes(x):
    expected = np.where(np.isnan(x), 0x80, en_codes(x))
    np.testing.assert_array_equal(hif8.encode(torch.from_numpy(x), overflow="inf").numpy(), expected)
    np.testing.assert_array_equal(hif8.encode(torch.from_numpy(x)).numpy(), saturated(expected, x))


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (0.0, 0x00), (-0.0, 0x00), (2.0**-149, 0x00), (2.0**-23 - 2.0**-47, 0x00), (2.0**-23, 0x01),
        (-(2.0**-23), 0x81), (2.0**-22 * 1.49, 0x01), (2.0**-22 * 1.5, 0x02), (1.0625, 0x09), (-1.0625, 0x89),
        (1.0624, 0x08), (15.49, 0x2F), (15.5, 0x40), (40959.0, 0x6E), (40960.0, 0x6E), (3e38, 0x6E),
        (-3e38, 0xEE), (math.inf, 0x6F), (-math.inf, 0xEF), (math.nan, 0x80),
    ],
)  # fmt: skip
def test_edges(value, code):
    assert hif8.encode(torch.tensor(value, dtype=torch.float32)).item() == code


def test_nan_with_a_low_payload_is_nan_and_not_inf():
    words = np.array([0x7F800001, 0xFF800001, 0x7F87FFFF, 0x7FC00000, 0xFFFFFFFF], dtype=np.uint32)
    for overflow in ("saturate", "inf"):
        assert hif8.encode(tensor_from_bits(words), overflow=overflow).tolist() == [0x80] * 5
    assert hif8.quantize(tensor_from_bits(words), torch.tensor(3.0)).tolist() == [0x80] * 5


def test_shapes_strides_and_autograd():
    base = torch.randn(6, 10, 4)
    whole = hif8.encode(base)
    for view, expected in (
        (base.transpose(0, 2), whole.transpose(0, 2)),
        (base[::2, 1::3], whole[::2, 1::3]),
        (base[:, :, 1], whole[:, :, 1]),
        (base[:0], whole[:0]),
    ):
        for x in (view, view.clone().requires_grad_()):
            codes = hif8.encode(x)
            assert codes.is_contiguous()
            assert codes.shape == view.shape
            assert torch.equal(codes, expected)
    assert torch.equal(hif8.decode(whole.transpose(0, 2)), hif8.decode(whole).transpose(0, 2))
    assert torch.equal(
        hif8.encode(base.bfloat16().transpose(0, 2)), hif8.encode(base.bfloat16()).transpose(0, 2)
    )
    with torch.inference_mode():
        assert torch.equal(hif8.encode(base), whole)


def test_pieces_and_host_looks_change_nothing(monkeypatch, random_fp32_bits, all_bf16):
    x, scale = random_fp32_bits[:10_001], torch.tensor(0.37)
    whole = [
        hif8.encode(x),
        hif8.quantize(x, scale),
        hif8.encode(all_bf16),
        hif8.decode(hif8.encode(all_bf16)),
    ]
    monkeypatch.setattr(_common, "_PIECE_NUMEL", 97)
    parts = [
        hif8.encode(x),
        hif8.quantize(x, scale),
        hif8.encode(all_bf16),
        hif8.decode(hif8.encode(all_bf16)),
    ]
    monkeypatch.setattr(hif8, "host_amax", lambda x: None)  # as on an accelerator
    blind = [hif8.encode(x), hif8.quantize(x, scale)]
    for a, b in zip(whole, parts):
        assert torch.equal(a.nan_to_num(), b.nan_to_num())
    for a, b in zip(whole, blind):
        assert torch.equal(a, b)


def test_rejects():
    for dtype in (torch.float16, torch.float64, torch.int32):
        with pytest.raises(TypeError, match="float32 or bfloat16"):
            hif8.encode(torch.zeros(2, dtype=dtype))
        with pytest.raises(TypeError, match="float32 or bfloat16"):
            hif8.quantize(torch.zeros(2, dtype=dtype), torch.tensor(1.0))
        with pytest.raises(TypeError, match="uint8"):
            hif8.decode(torch.zeros(2, dtype=dtype))
    with pytest.raises(TypeError, match=r"torch\.Tensor"):
        hif8.encode(np.zeros(2, dtype=np.float32))
    with pytest.raises(ValueError, match="overflow"):
        hif8.encode(torch.zeros(2), overflow="wrap")
    with pytest.raises(TypeError, match="float32 or bfloat16"):
        hif8.decode(torch.zeros(2, dtype=torch.uint8), dtype=torch.float16)
    with pytest.raises(TypeError, match="float32"):
        hif8.quantize(torch.zeros(2), 1.0)
    with pytest.raises(TypeError, match="float32"):
        hif8.quantize(torch.zeros(2), torch.tensor(1.0, dtype=torch.float64))
    with pytest.raises(ValueError, match="broadcast"):
        hif8.quantize(torch.zeros(2, 1), torch.ones(3))
