"""A run that computes anything else than its plan ends with LedgerError: after the first step, or at the end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from quaver.assembly import Assembly
from quaver.distributed import local_tensor
from quaver.errors import LedgerError
from quaver.low_precision import low_precision_modules
from quaver.training import train

O_PROJ = "model.layers.1.self_attn.o_proj"


def ledger_of(folder: Path) -> dict:
    return json.loads((folder / "ledger.json").read_text())


def losses(folder: Path) -> list:
    return [line for line in (folder / "metrics.jsonl").read_text().splitlines() if '"loss"' in line]


def swap_back(monkeypatch, wanted) -> list[str]:
    """After the install, puts the modules that transformers made back in the places of those `wanted`."""
    original, swapped = Assembly.install, []

    def install(self: Assembly) -> None:
        before = dict(self.model.named_modules())
        original(self)
        for fqn, module in list(low_precision_modules(self.model)):
            if wanted(fqn, module):
                self.model.set_submodule(fqn, before[fqn])
                swapped.append(fqn)

    monkeypatch.setattr(Assembly, "install", install)
    return swapped


@pytest.mark.parametrize("fmt", ["mxfp8", "hif8"])
def test_a_linear_swapped_back(micro, tmp_path, monkeypatch, fmt: str) -> None:
    swapped = swap_back(monkeypatch, lambda fqn, _: fqn == O_PROJ)
    with pytest.raises(LedgerError, match=r"o_proj: 0 training forward passes, 1 micro-steps") as raised:
        train(micro(fmt), out=tmp_path / "run")
    assert set(swapped) == {O_PROJ}
    assert raised.value.exit_code == 3
    assert ledger_of(tmp_path / "run")["ok"] is False
    assert len(losses(tmp_path / "run")) == 1


def test_all_experts_swapped_back(micro, tmp_path, monkeypatch) -> None:
    swapped = swap_back(monkeypatch, lambda fqn, module: not isinstance(module, nn.Linear))
    with pytest.raises(LedgerError, match=r"layers\.1\.mlp\.experts\.gate_up_proj: 0 training") as raised:
        train(micro("mxfp8"), out=tmp_path / "run")
    assert set(swapped) == {"model.layers.1.mlp.experts", "model.layers.2.mlp.experts"}
    for fqn in swapped:
        for name in ("gate_up_proj", "down_proj"):
            assert f"{fqn}.{name}: 0 training" in str(raised.value)
    assert ledger_of(tmp_path / "run")["ok"] is False


def test_everything_but_one_swapped_back(micro, tmp_path, monkeypatch) -> None:
    """No module is left that could announce its absence: only the plan as it was installed knows."""
    swapped = swap_back(monkeypatch, lambda fqn, _: fqn != O_PROJ)
    with pytest.raises(LedgerError, match=r"24 differences"):
        train(micro("mxfp8"), out=tmp_path / "run")
    assert len(set(swapped)) == 3 * 4 + 3 + 2 * 3 + 2 - 1
    assert ledger_of(tmp_path / "run")["ok"] is False


def detaching(monkeypatch, when) -> None:
    """From then on one module computes with a weight that gets no gradient."""
    import quaver.low_precision.modules as modules

    real = modules.low_precision_linear

    def linear(x, weight, *, fqn, recipe):
        lost = fqn == O_PROJ and torch.is_grad_enabled() and when()
        return real(x, weight.detach() if lost else weight, fqn=fqn, recipe=recipe)

    monkeypatch.setattr(modules, "low_precision_linear", linear)


def test_a_lost_weight_gradient(micro, tmp_path, monkeypatch) -> None:
    detaching(monkeypatch, lambda: True)
    with pytest.raises(LedgerError, match=r"o_proj wgrad: 0 GEMMs for 1 training forward passes"):
        train(micro("mxfp8"), out=tmp_path / "run")
    assert len(losses(tmp_path / "run")) == 1
    assert ledger_of(tmp_path / "run")["ok"] is False


def test_what_goes_wrong_later_is_found_at_the_end(micro, tmp_path, monkeypatch) -> None:
    passes = []
    detaching(monkeypatch, lambda: passes.append(1) or len(passes) == 3)
    with pytest.raises(LedgerError, match=r"o_proj wgrad: 3 GEMMs for 4 training forward passes"):
        train(micro("mxfp8"), out=tmp_path / "run")
    assert len(losses(tmp_path / "run")) == 4
    assert ledger_of(tmp_path / "run")["ok"] is False


def test_it_is_checked_after_a_skipped_first_step_too(micro, tmp_path, monkeypatch) -> None:
    """A skipped step ran its GEMMs like any other."""
    import quaver.training.trainer as trainer

    real = trainer.train_step

    def poisoned(assembly, sample, **rest):
        norm = next(p for n, p in assembly.model.named_parameters() if n == "model.norm.weight")
        local_tensor(norm.detach()).fill_(torch.nan)
        return real(assembly, sample, **rest)

    monkeypatch.setattr(trainer, "train_step", poisoned)
    detaching(monkeypatch, lambda: True)
    with pytest.raises(LedgerError, match="o_proj wgrad: 0 GEMMs for 1"):
        train(micro("mxfp8"), out=tmp_path / "run")
    (line,) = losses(tmp_path / "run")
    assert json.loads(line)["skipped"] == 1


@pytest.mark.parametrize("moment", ["before", "forward", "update"])
def test_a_crash_in_the_first_step_proves_nothing(micro, tmp_path, monkeypatch, moment: str) -> None:
    def crash(*_, **__):
        raise RuntimeError("the device went away")

    if moment == "before":
        monkeypatch.setattr("quaver.training.trainer.train_step", crash)
    elif moment == "forward":
        monkeypatch.setattr("quaver.low_precision.modules.low_precision_linear", crash)
    else:
        monkeypatch.setattr("quaver.training.step.gradient_norm", crash)
    with pytest.raises(RuntimeError, match="went away"):  # and not the report's lack of anything to show
        train(micro("mxfp8", "training.validate_every=0"), out=tmp_path / "run")
    assert ledger_of(tmp_path / "run")["ok"] is False
    assert not losses(tmp_path / "run")


def test_a_crash_after_sound_steps_keeps_what_they_proved(micro, tmp_path, monkeypatch) -> None:
    import quaver.training.trainer as trainer

    real, calls = trainer.train_step, []

    def crash(*args, **rest):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("the device went away")
        return real(*args, **rest)

    monkeypatch.setattr(trainer, "train_step", crash)
    with pytest.raises(RuntimeError, match="went away"):
        train(micro("mxfp8"), out=tmp_path / "run")
    document = ledger_of(tmp_path / "run")
    assert document["ok"] is True
    assert {entry["count"] for entry in document["entries"]} == {2}


@pytest.mark.parametrize("fmt", ["bf16", "mxfp8"])
def test_a_parameter_without_a_gradient_ends_the_run(micro, tmp_path, monkeypatch, fmt: str) -> None:
    """Of a module that is not in the plan no GEMM is counted; its lost gradient is told all the same."""
    original = nn.Linear.forward

    def forward(self, input):
        head = self.out_features == 260 and torch.is_grad_enabled()
        return nn.functional.linear(input, self.weight.detach()) if head else original(self, input)

    monkeypatch.setattr(nn.Linear, "forward", forward)
    with pytest.raises(LedgerError, match=r"1 parameters train, but step 1 gave them no gradient") as raised:
        train(micro(fmt), out=tmp_path / "run")
    assert "lm_head.weight" in str(raised.value)
    assert ledger_of(tmp_path / "run")["ok"] is (fmt == "bf16")  # off: there is nothing to prove
