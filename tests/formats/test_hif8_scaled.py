"""HiF8 with a scale: the quotient's guard, the table route, known noise figures."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from format_vectors import sqnr_db, tensor_from_bits

from quaver.formats import hif8


def test_scale_is_the_fp32_quotient_and_guards_the_quotient():
    amax = torch.tensor([7.3, 0.0, 1e-45, float("inf"), float("nan"), 3.4e38, 1e-38])
    expected = np.float32(7.3) / np.float32(15), 1.0, 1.0, 1.0, 1.0, np.float32(3.4e38) / np.float32(15)
    scale = hif8.scale_from_amax(amax, hif8.SCALE_MAX_INPUT)
    assert scale.dtype == torch.float32
    assert scale[:6].tolist() == [float(v) for v in expected]
    assert scale[6].item() == float(np.float32(1e-38) / np.float32(15))  # a subnormal scale is a scale
    assert (
        hif8.scale_from_amax(torch.tensor(224.0, dtype=torch.bfloat16), hif8.SCALE_MAX_GRADIENT).item() == 1.0
    )
    assert hif8.scale_from_amax(torch.tensor(224.0), 224.0).shape == ()


def test_quantize_is_encode_of_the_quotient(random_fp32_bits):
    x = random_fp32_bits[:100_000]
    for scale in (1.0, 0.1, 3.7e-4, 123.456, 1e-40, 2.0**100):
        with np.errstate(all="ignore"):
            quotient = x.numpy() / np.float32(scale)
        expected = hif8.encode(torch.from_numpy(quotient))
        assert torch.equal(hif8.quantize(x, torch.tensor(scale)), expected)


def test_quantize_per_expert_equals_one_by_one():
    w_ENK = torch.randn(3, 5, 7) * torch.tensor([1.0, 100.0, 1e-3])[:, None, None]
    scale_E = hif8.scale_from_amax(w_ENK.abs().amax((1, 2)), hif8.SCALE_MAX_INPUT)
    for w in (w_ENK, w_ENK.bfloat16()):
        codes = hif8.quantize(w, scale_E[:, None, None])
        assert codes.is_contiguous()
        for e in range(3):
            assert torch.equal(codes[e], hif8.quantize(w[e], scale_E[e]))
            assert torch.equal(codes[e], hif8.quantize(w[e], scale_E[e : e + 1]))


def test_non_finite_stays_non_finite_and_finite_saturates():
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), 1e30, -1e30, 15.0])
    for dtype in (torch.float32, torch.bfloat16):
        codes = hif8.quantize(x.to(dtype), torch.tensor(1.0))
        assert codes.tolist() == [0x80, 0x6F, 0xEF, 0x6E, 0xEE, 0x2F]


def scales_under_test():
    generator = np.random.default_rng(3)
    drawn = 2.0 ** generator.uniform(-120, 120, 40)
    return [1.0, 15.0, 1 / 15, 2.0**-126, 1e-40, 2.0**-149, 2.0**127, 1.9999999, *drawn]


def test_table_route_equals_arithmetic_on_every_bf16_pattern(monkeypatch, all_bf16):
    shuffled = all_bf16[torch.randperm(65536, generator=torch.Generator().manual_seed(1))].view(256, 256)
    built = []
    table_of = hif8.bf16_values
    monkeypatch.setattr(hif8, "bf16_values", lambda device: built.append(device) or table_of(device))
    for value in scales_under_test():
        scale = torch.tensor(value, dtype=torch.float32)
        with np.errstate(all="ignore"):
            quotient = shuffled.float().numpy() / scale.numpy()
        expected = hif8.encode(torch.from_numpy(quotient))
        monkeypatch.setattr(hif8, "TABLE_MIN_NUMEL", 0)
        assert torch.equal(hif8.quantize(shuffled.t(), scale), expected.t())
        monkeypatch.setattr(hif8, "TABLE_MIN_NUMEL", 1 << 40)
        assert torch.equal(hif8.quantize(shuffled.t(), scale), expected.t())
    assert len(built) == len(scales_under_test())


def test_fp32_never_takes_the_bf16_table(monkeypatch):
    monkeypatch.setattr(hif8, "TABLE_MIN_NUMEL", 0)
    x = tensor_from_bits(
        np.array([0x3F87FFFF], dtype=np.uint32)
    )  # just below the tie 1.0625, which BF16 hits
    assert x.bfloat16().item() == 1.0625
    assert hif8.quantize(x, torch.tensor(1.0)).item() == 0x08
    assert hif8.quantize(x.bfloat16(), torch.tensor(1.0)).item() == 0x09


@pytest.mark.parametrize(
    ("format_max", "expected_db"), [(hif8.SCALE_MAX_INPUT, 31.57), (hif8.SCALE_MAX_GRADIENT, 25.60)]
)
def test_noise_on_a_normal_distribution(format_max, expected_db):
    x = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0))
    scale = hif8.scale_from_amax(x.abs().amax(), format_max)
    y = hif8.decode(hif8.quantize(x, scale)) * scale
    assert sqnr_db(x, y) == pytest.approx(expected_db, abs=0.03)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_equals_cpu(all_bf16, random_fp32_bits):
    for x in (all_bf16, random_fp32_bits):
        for overflow in ("saturate", "inf"):
            assert torch.equal(
                hif8.encode(x.cuda(), overflow=overflow).cpu(), hif8.encode(x, overflow=overflow)
            )
        scale = torch.tensor(0.3)
        assert torch.equal(hif8.quantize(x.cuda(), scale).cpu(), hif8.quantize(x, scale))
