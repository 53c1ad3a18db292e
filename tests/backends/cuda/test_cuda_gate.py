"""Compute capability 10.x and MXFP8, or one sentence that says why not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from quaver.backends.cuda import CUDABackend, CudaFacts, probe
from quaver.config import LowPrecisionConfig
from quaver.errors import CapabilityError

B200 = CudaFacts("NVIDIA B200", (10, 0), {"torch": "2.13.0", "cuda": "12.9"})


def config(**keys):
    return LowPrecisionConfig(enabled=True, backend="cuda", **keys)


def refusal(facts, **keys) -> str:
    with pytest.raises(CapabilityError) as caught:
        CUDABackend(facts=facts).check_capability(config(**keys))
    assert "\n" not in caught.value.what
    assert "backend: reference" in caught.value.remedy
    return caught.value.what


@pytest.mark.parametrize("rule", ["floor", "rceil"])
@pytest.mark.parametrize("capability", [(10, 0), (10, 3)])
def test_blackwell_passes(capability, rule):
    CUDABackend(facts=replace(B200, capability=capability)).check_capability(config(scale_rule=rule))


@pytest.mark.parametrize(("name", "capability"), [("NVIDIA H200", (9, 0)), ("NVIDIA GeForce RTX 5090", (12, 0))])
def test_others_do_not(name, capability):
    what = refusal(replace(B200, name=name, capability=capability))
    assert name in what
    assert ".".join(map(str, capability)) in what
    assert "need compute capability 10.x" in what
    assert "torch 2.13.0" in what


def test_hif8_has_no_gpu():
    assert "no NVIDIA GPU multiplies hif8" in refusal(B200, format="hif8", scaling="current")


def test_functions_and_dtypes_are_needed():
    assert "scaled_grouped_mm is missing" in refusal(replace(B200, functions=frozenset({"scaled_mm"})))
    assert "float8_e8m0fnu is missing" in refusal(replace(B200, dtypes=frozenset({"float8_e4m3fn"})))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_this_machine_has_none():
    facts = probe()
    assert facts.functions == {"scaled_mm", "scaled_grouped_mm"}
    assert facts.name is None
    assert "CUDA" in refusal(facts)
