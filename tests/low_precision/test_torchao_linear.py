"""MXFP8 against torchao's emulated MXFP8Linear in FLOOR mode: y, dx and dw, bit for bit."""

from __future__ import annotations

import pytest
import torch
from helpers.policies import FLOOR, linear
from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.quantization.quantize_.common.kernel_preference import KernelPreference


def torchao_linear(weight, bias):
    module = MXFP8Linear(
        weight.shape[1],
        weight.shape[0],
        bias=bias is not None,
        kernel_preference=KernelPreference.EMULATED,
        scale_calculation_mode=ScaleCalculationMode.FLOOR,
        dtype=torch.bfloat16,
    )
    with torch.no_grad():
        module.weight.copy_(weight)
        if bias is not None:
            module.bias.copy_(bias)
    return module


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("shape", [(64,), (3, 32), (2, 5, 32)], ids=str)
@pytest.mark.parametrize(("K", "N"), [(32, 32), (96, 160), (256, 64), (512, 352)])
def test_linear_equals_torchao(K, N, shape, biased):
    """Tokens a multiple of 32, masters that are BF16 values, no scale byte 0."""
    torch.manual_seed(K + N)
    weight = (torch.randn(N, K) * 0.05).bfloat16().float()
    bias = torch.randn(N).bfloat16().float() if biased else None
    # amplitudes over ten octaves, so that neighbouring blocks have different scales
    octaves = 2.0 ** torch.randint(-5, 6, (*shape, 1)).float()
    x = (torch.randn(*shape, K) * octaves).bfloat16()
    g = (torch.randn(*shape, N) * 1e-4).bfloat16()
    found, wanted = [], []
    for module, out in ((linear(FLOOR, weight, bias), found), (torchao_linear(weight, bias), wanted)):
        leaf = x.clone().requires_grad_()
        y = module(leaf)
        y.backward(g)
        out += [y.detach(), leaf.grad, module.weight.grad.bfloat16()]
        out += [module.bias.grad.bfloat16()] if biased else []
    names = ["y", "dx", "dw", "db"]
    assert [n for n, a, b in zip(names, found, wanted) if a.shape != b.shape or not torch.equal(a, b)] == []
