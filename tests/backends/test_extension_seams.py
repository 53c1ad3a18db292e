"""A backend is chosen by name; a new format is one codec, one recipe and one weight class, handed in explicitly."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from helpers.policies import linear

from quaver.backends import (
    Ledger,
    QuantizationRole,
    QuantizedOperand,
    ReferenceBackend,
    ScalingSpec,
    backend_for,
)
from quaver.backends.codecs import BUILTIN_CODECS, Factors
from quaver.config import LowPrecisionConfig
from quaver.errors import CapabilityError
from quaver.low_precision import HiF8Tensor, RecipeSpec, policy_for

E5M2_MAX = 57344.0


class E5M2Codec:
    """FP8 E5M2 with one scale a tensor, by torch's own dtype."""

    axis_free = True

    def quantize(self, tensor, spec, orientation, group_list, amax):
        amax = tensor.abs().amax().float() if amax is None else amax
        scale = amax / spec.format_max
        return (tensor.float() / scale).to(torch.float8_e5m2).view(torch.uint8), scale

    def misfit(self, operand, ends):
        return None if operand.scale.dtype is torch.float32 else "an E5M2 scale is FP32"

    def factors(self, operand: QuantizedOperand, dtype, group_list=None) -> Factors:
        return Factors(operand.data.view(torch.float8_e5m2).to(dtype), operand.scale)


def test_a_third_format_trains_a_linear():
    scaling = ScalingSpec("e5m2", format_max=E5M2_MAX)
    recipe = RecipeSpec("e5m2/current@1", "e5m2", dict.fromkeys(QuantizationRole, scaling))
    bound = policy_for(
        SimpleNamespace(recipe_id=recipe.id),
        ReferenceBackend(codecs={**BUILTIN_CODECS, "e5m2": E5M2Codec()}),
        recipes={recipe.id: recipe},
        weight_classes={"e5m2": HiF8Tensor},
    )
    torch.manual_seed(0)
    w, x, g = torch.randn(96, 64), torch.randn(8, 64).bfloat16(), torch.randn(8, 96).bfloat16()

    def fake(t):
        scale = t.abs().max().float() / E5M2_MAX
        return (t.float() / scale).to(torch.float8_e5m2).double() * scale.double()

    module, leaf = linear(bound, w), x.clone().requires_grad_()
    y = module(leaf)
    y.backward(g)
    exact = [fake(x) @ fake(w).t(), fake(g) @ fake(w), fake(g).t() @ fake(x)]
    for found, wanted in zip((y.detach(), leaf.grad, module.weight.grad), exact):
        torch.testing.assert_close(found.double(), wanted, rtol=2**-8, atol=1e-4)
    assert {key[3] for key in bound.backend.ledger.executed} == {"e5m2"}


def test_the_reference_backend_is_chosen_by_name_and_keeps_the_ledger():
    ledger = Ledger(recipe="hif8/current@1")
    backend = backend_for(LowPrecisionConfig(enabled=True, format="hif8", scaling="current"), ledger)
    assert isinstance(backend, ReferenceBackend)
    assert backend.ledger is ledger


@pytest.mark.parametrize("name", ["npu", "cuda"])
def test_another_backend_is_asked_for_its_device(name, monkeypatch):
    from quaver.backends.cuda import CudaFacts, device
    from quaver.backends.npu import DeviceFacts, backend

    monkeypatch.setattr(backend, "probe", lambda: DeviceFacts(trouble="there is none"))
    monkeypatch.setattr(device, "probe", lambda: CudaFacts(trouble="there is none"))
    config = LowPrecisionConfig(enabled=True, backend=name)
    with pytest.raises(CapabilityError, match=rf"(?s)backend {name} cannot run.*none.*low_precision\.backend"):
        backend_for(config, Ledger())
    assert backend_for(config, Ledger(), check=False).name == name  # a plan needs no device


def test_a_format_without_a_codec_is_refused_before_anything_runs():
    with pytest.raises(
        CapabilityError, match=r"(?s)no codec for format 'hif8'.*low_precision\.format.*mxfp8_e4m3"
    ):
        ReferenceBackend(codecs={"mxfp8_e4m3": BUILTIN_CODECS["mxfp8_e4m3"]}).check_capability(
            LowPrecisionConfig(enabled=True, format="hif8", scaling="current")
        )
