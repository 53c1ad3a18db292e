"""Products with packed weights are torch.mm's bit for bit, and are taken only where they are."""

from __future__ import annotations

import pytest
import torch
from helpers.policies import FLOOR, policy

from quaver.backends import GemmSite, QuantizationRole, ReferenceBackend
from quaver.backends.native import packing
from quaver.formats import mxfp8

Role = QuantizationRole
needs_onednn = pytest.mark.skipif(not packing.supported(), reason="oneDNN has no BF16 GEMM on this CPU")


@needs_onednn
@pytest.mark.parametrize("shape", [(64, 64), (192, 320), (1024, 2048), (2816, 512)])
@pytest.mark.parametrize("rows", [1, 7, 64, 333])
def test_a_packed_product_is_torchs(compiled, shape, rows):
    w, x = torch.randn(shape), torch.randn(rows, shape[1]).bfloat16()
    codes, scales = mxfp8.quantize(w)
    packed = packing.pack(codes, scales, columns=False)
    wanted = x @ mxfp8.dequantize(codes, scales, dtype=torch.bfloat16).t()
    assert torch.equal(packing.linear(x, packed), wanted)
    codes, scales = mxfp8.quantize(w.t().contiguous(), axis=0)
    packed = packing.pack(codes, scales, columns=True)
    wanted = x @ mxfp8.dequantize(codes, scales, axis=0, dtype=torch.bfloat16)
    assert torch.equal(packing.linear(x, packed), wanted)


@needs_onednn
def test_what_is_not_packed(compiled, monkeypatch):
    codes, scales = mxfp8.quantize(torch.randn(64, 96))
    assert packing.pack(codes, scales, columns=False) is None  # 96 is no multiple of 64
    codes, scales = mxfp8.quantize(torch.randn(64, 64))
    assert packing.pack(codes, scales, columns=False) is not None
    scales[0, 0] = 3
    assert packing.pack(codes, scales, columns=False) is None
    packing.supported.cache_clear()
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    try:
        codes, scales = mxfp8.quantize(torch.randn(64, 64))
        assert packing.pack(codes, scales, columns=False) is None
    finally:
        monkeypatch.undo()
        packing.supported.cache_clear()


@needs_onednn
def test_a_shape_whose_packed_product_differs_is_never_packed(compiled, monkeypatch):
    """The check of a new shape: here the private operator rounds otherwise."""
    monkeypatch.setattr(packing, "_POOL", packing._Pool())
    real = packing.linear
    monkeypatch.setattr(packing, "linear", lambda x, packed: real(x, packed) * 1.01)
    codes, scales = mxfp8.quantize(torch.randn(64, 64))
    assert packing.pack(codes, scales, columns=False) is None
    assert packing._POOL.buffers == {(64, 64): None}


@needs_onednn
def test_the_pool_is_bounded(compiled, monkeypatch):
    monkeypatch.setattr(packing, "_POOL", packing._Pool())
    monkeypatch.setattr(packing, "POOL_BYTES", 4 * 64 * 64 * 2)
    for features in (64, 128, 192, 256):
        codes, scales = mxfp8.quantize(torch.randn(features, 64))
        assert packing.pack(codes, scales, columns=False) is not None
    assert list(packing._POOL.buffers) == [(256, 64)]


@needs_onednn
@pytest.mark.parametrize("layout", ["NT", "NN"])
def test_weights_follow_one_another_through_one_buffer(compiled, layout):
    """Two weights of one shape, multiplied in turn, and the first again: nothing is left of the other."""
    recipe, backend = policy(FLOOR).recipe, ReferenceBackend()
    orientation = "row" if layout == "NT" else "col"
    weights = [
        recipe.quantizer(Role.WEIGHT_FWD).quantize(torch.randn(128, 128), orientation=orientation) for _ in range(2)
    ]
    x = recipe.quantizer(Role.INPUT_FWD).quantize(torch.randn(9, 128).bfloat16(), orientation="row")

    def product(weight):
        return backend.low_precision_matmul(
            x, weight, layout=layout, output_dtype=torch.bfloat16, site=GemmSite("m", "fprop")
        )

    first, second, again = product(weights[0]), product(weights[1]), product(weights[0])
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    axis = -1 if layout == "NT" else 0
    for found, weight in ((first, weights[0]), (second, weights[1])):
        values = mxfp8.dequantize(weight.data, weight.scale, axis=axis, dtype=torch.bfloat16)
        assert torch.equal(found, x.values @ (values.t() if layout == "NT" else values))


@needs_onednn
def test_one_expert_that_bf16_cannot_hold_puts_all_on_the_fp32_path(paths):
    """Also where that expert has no tokens, on both paths alike."""
    counts = torch.tensor([40, 0, 24])
    results = []
    for path in ("off", "native"):
        paths(path)
        torch.manual_seed(0)
        recipe, backend = policy(FLOOR).recipe, ReferenceBackend()
        x, w = torch.randn(64, 128).bfloat16(), torch.randn(3, 128, 192)
        w[1, 0, 0] = float("inf")
        left = recipe.quantizer(Role.INPUT_FWD).quantize(x, orientation="row")
        right = recipe.quantizer(Role.WEIGHT_FWD).quantize(w, orientation="col")
        results.append(
            backend.low_precision_grouped_matmul(
                left, right, counts.cumsum(0), layout="NN", output_dtype=torch.bfloat16, site=GemmSite("m", "fprop")
            )
        )
    assert torch.equal(results[0], results[1])
