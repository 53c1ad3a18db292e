"""The capability gate: an Ascend 950 with every operator and tag of the recipe, or one sentence."""

from __future__ import annotations

import sys

import pytest
from helpers import npu_harness
from torch import nn

import quaver
from quaver.backends import Ledger, backend_for
from quaver.backends.npu import NPUBackend, device, gate, probe
from quaver.backends.npu.tags import NEEDS
from quaver.config import LowPrecisionConfig
from quaver.errors import CapabilityError

RECIPES = [
    {"format": "mxfp8_e4m3", "scale_rule": "floor"},
    {"format": "mxfp8_e4m3", "scale_rule": "rceil"},
    {"format": "hif8", "scaling": "current"},
]


def config(**keys):
    return LowPrecisionConfig(enabled=True, backend="npu", **keys)


def refusal(facts, **keys) -> CapabilityError:
    with pytest.raises(CapabilityError) as caught:
        NPUBackend(device=facts).check_capability(config(**keys))
    assert "\n" not in caught.value.what
    assert caught.value.where == "low_precision.backend"
    assert "backend: reference" in caught.value.remedy
    return caught.value


@pytest.fixture(autouse=True)
def registered():
    npu_harness.install()


@pytest.fixture
def installed(monkeypatch, tmp_path):
    """installed(source): a module torch_npu with that source can be imported, until the test ends."""
    monkeypatch.setitem(sys.modules, "torch_npu", None)  # remembered, so that nothing stays behind
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(source):
        (tmp_path / "torch_npu.py").write_text(source)
        del sys.modules["torch_npu"]

    yield write
    sys.modules.pop("torch_npu", None)


@pytest.mark.parametrize("name", ["Ascend950PR_9599", "Ascend910_9589"])
@pytest.mark.parametrize("keys", RECIPES)
def test_an_ascend_950_passes_by_either_name(keys, name):
    NPUBackend(device=npu_harness.facts(name=name)).check_capability(config(**keys))


@pytest.mark.parametrize(
    ("name", "soc"),
    [("Ascend910_9382", 250), ("Ascend910_9382", 255), ("Ascend910B2", 222), ("Ascend950DT", 250), ("X", 260)],
)
def test_other_chips_are_refused(name, soc):
    """SoC versions from 250 on are A3: only the name and 260 together are A5."""
    error = refusal(npu_harness.facts(name=name, soc_version=soc))
    assert all(word in error.what for word in (name, str(soc), "torch_npu 2.13.0", "op npu_dynamic_mx_quant"))
    assert "Ascend 950" in error.what


@pytest.mark.parametrize("keys", RECIPES)
def test_each_operator_argument_and_tag_is_needed(keys):
    whole = npu_harness.facts()
    needs = NEEDS[keys["format"]]
    for name in needs.ops:
        error = refusal(npu_harness.facts(ops={k: v for k, v in whole.ops.items() if k != name}), **keys)
        assert f"op {name} is missing" in error.what
        assert "Ascend950DT" in error.what
    for name, arguments in needs.ops.items():
        for argument in arguments:
            less = {**whole.ops, name: whole.ops[name] - {argument}}
            assert f"{name} is missing (takes no {argument})" in refusal(npu_harness.facts(ops=less), **keys).what
    for name in needs.tags:
        less = {k: v for k, v in whole.tags.items() if k != name}
        assert name in refusal(npu_harness.facts(tags=less), **keys).what
        assert "is 7 and not" in refusal(npu_harness.facts(tags={**whole.tags, name: 7}), **keys).what


def test_a_format_needs_nothing_of_the_other():
    ops = npu_harness.facts().ops
    only = {name: ops[name] for name in NEEDS["hif8"].ops}
    NPUBackend(device=npu_harness.facts(ops=only, tags={"hifloat8": 290})).check_capability(config(**RECIPES[2]))


def test_no_torch_npu(monkeypatch):
    monkeypatch.setattr(device.importlib.util, "find_spec", lambda name: None)
    error = refusal(probe())
    assert "torch_npu is not installed" in error.what
    assert "docs/ascend.md" in error.remedy


def test_a_torch_npu_without_cann_says_why(installed):
    installed("raise ImportError('libhccl.so: cannot open shared object file\\nand more')\n")
    error = refusal(probe())
    assert "torch_npu cannot be imported (ImportError: libhccl.so: cannot open shared object file)" in error.what


def test_a_torch_npu_without_a_device(installed):
    installed(
        "from types import SimpleNamespace as N\nhifloat8, float8_e4m3fn, float8_e8m0fnu = 290, 292, 293\n"
        "npu = N(is_available=lambda: False, utils=N(get_cann_version=lambda: '9.1.0'))\n"
    )
    facts = probe()
    assert facts.tags == npu_harness.facts().tags
    assert facts.versions["cann"] == "9.1.0"
    assert "torch_npu finds no device" in refusal(facts).what


def test_a_device_that_answers(installed):
    installed(
        "from types import SimpleNamespace as N\nhifloat8, float8_e4m3fn, float8_e8m0fnu = 290, 292, 293\n"
        "npu = N(is_available=lambda: True, get_device_name=lambda: 'Ascend950DT_9582',\n"
        "        utils=N(get_cann_version=lambda: '9.1.0', get_soc_version=lambda: 260))\n"
    )
    facts = probe()
    assert (facts.name, facts.soc_version, facts.device_type) == ("Ascend950DT_9582", 260, "npu")
    assert facts.ops == npu_harness.facts().ops
    gate.check(facts, config())


def test_the_registry_asks_the_gate(monkeypatch):
    from quaver.backends.npu import backend

    monkeypatch.setattr(backend, "probe", npu_harness.facts)
    assert backend_for(config(), Ledger()).name == "npu"
    monkeypatch.setattr(backend, "probe", lambda: npu_harness.facts(soc_version=250))
    with pytest.raises(CapabilityError, match="SoC is 250"):
        backend_for(config(), Ledger())


def test_quantize_modules_leaves_the_model_alone():
    model = nn.Sequential(nn.Linear(64, 64))
    rule = quaver.ReplacementRule("0", nn.Linear, "low_precision_linear")
    with pytest.raises(CapabilityError, match="backend npu cannot run"):
        quaver.quantize_modules(model, config(), plan=rule)
    assert type(model[0]) is nn.Linear
