"""Decoding equals the torch codec on every code at every scale byte, and packs weights as oneDNN does."""

from __future__ import annotations

import ctypes

import pytest
import torch

from quaver.backends.native import kernels
from quaver.formats import mxfp8

CODES = torch.arange(256, dtype=torch.uint8)


def exact_in_bf16(codes, scales, axis):
    """The reference codec's rule: which operands it multiplies in BF16."""
    nonzero = (codes & 0x7F) != 0
    tiny = nonzero & (mxfp8.dequantize(codes, scales, axis=axis).abs() < 2.0**-126)
    outside = ((scales > 0) & (scales < 10)) | (scales > 246)
    return not bool(outside.any()) and not bool((tiny).any())


@pytest.mark.parametrize("scale", [*range(14), 100, 127, 200, *range(244, 256)])
def test_every_code_at_a_scale(compiled, scale):
    """Code by code, since one that BF16 cannot hold refuses its whole operand."""
    for code in range(256):
        codes = torch.full((32, 32), code, dtype=torch.uint8)
        scales = torch.full((32, 1), scale, dtype=torch.uint8)
        rows, columns = kernels.decode_rows(codes, scales), kernels.decode_columns(codes, scales.t())
        assert (rows is not None) == (columns is not None) == exact_in_bf16(codes, scales, -1), code
        if rows is not None:
            wanted = mxfp8.dequantize(codes, scales, dtype=torch.bfloat16)
            if code & 0x7F == 0x7F:
                assert rows.isnan().all()
                assert columns.isnan().all()
            else:
                assert torch.equal(rows.view(torch.int16), wanted.view(torch.int16))
                assert torch.equal(columns.view(torch.int16), wanted.view(torch.int16))


@pytest.mark.parametrize("shape", [(33, 47), (64, 300), (3, 40, 65), (0, 32), (5, 0)])
def test_shapes(compiled, shape):
    x = torch.randn(shape)
    for axis, decode in ((-1, kernels.decode_rows), (-2, kernels.decode_columns)):
        codes, scales = mxfp8.quantize(x, axis=axis)
        wanted = mxfp8.dequantize(codes, scales, axis=axis, dtype=torch.bfloat16)
        assert torch.equal(decode(codes, scales), wanted)


def test_one_lossy_code_among_many(compiled):
    x = torch.randn(100, 100)
    codes, scales = mxfp8.quantize(x)
    scales[37, 2] = 0
    codes[37, 64:96] = 0
    assert kernels.decode_rows(codes, scales) is not None
    codes[37, 70] = 1
    assert kernels.decode_rows(codes, scales) is None
    codes[37, 70] = 0x40  # 2.0 * 2^-127, the smallest normal number
    assert kernels.decode_rows(codes, scales)[37, 70] == 2.0**-126
    codes, scales = mxfp8.quantize(x, axis=0)
    scales[3, 99], codes[96:, 99] = 0, 0
    assert kernels.decode_columns(codes, scales) is not None
    codes[99, 99] = 0x3F
    assert kernels.decode_columns(codes, scales) is None


def test_groups(compiled):
    x, ends = torch.randn(140, 70), torch.tensor([1, 1, 34, 140])
    codes, scales = mxfp8.quantize_groups(x, ends)
    wanted = mxfp8.dequantize_groups(codes, scales, ends, torch.bfloat16)
    assert torch.equal(kernels.decode_columns(codes, scales, ends), wanted)


@pytest.mark.parametrize("shape", [(64, 64), (128, 64), (64, 192), (320, 448)])
def test_packing_is_one_interleaving(compiled, shape):
    """[features / 64][contracted / 2][64][2], worked out with torch's own views."""
    features, contracted = shape
    x = torch.randn(shape)
    x[5:40, 32:64] = 0
    out = torch.empty(features * contracted, dtype=torch.bfloat16)

    def blocked(values):
        return values.view(features // 64, 64, contracted // 2, 2).transpose(1, 2).reshape(-1)

    codes, scales = mxfp8.quantize(x)
    assert kernels.pack_into(codes, scales, columns=False, address=out.data_ptr())
    assert torch.equal(out, blocked(mxfp8.dequantize(codes, scales, dtype=torch.bfloat16)))
    codes, scales = mxfp8.quantize(x.t().contiguous(), axis=0)
    assert kernels.pack_into(codes, scales, columns=True, address=out.data_ptr())
    values = mxfp8.dequantize(codes, scales, axis=0, dtype=torch.bfloat16)
    assert torch.equal(out, blocked(values.t().contiguous()))
    scales[1, 3] = 5
    assert not kernels.pack_into(codes, scales, columns=True, address=out.data_ptr())
    codes, scales = mxfp8.quantize(x)
    scales[63, 1] = 255
    assert not kernels.pack_into(codes, scales, columns=False, address=out.data_ptr())


def test_packing_writes_nothing_beyond_its_end(compiled):
    x = torch.randn(64, 64)
    codes, scales = mxfp8.quantize(x)
    guarded = (ctypes.c_uint16 * (64 * 64 + 64))(*[0xABCD] * (64 * 64 + 64))
    assert kernels.pack_into(codes, scales, columns=False, address=ctypes.addressof(guarded))
    assert list(guarded)[-64:] == [0xABCD] * 64
