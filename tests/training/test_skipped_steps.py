"""Steps that do not update: non-finite ones are skipped and counted, and nothing of the state moves."""

import json
import math

import pytest
import torch
from test_equalities import batches, build, masters

from quaver.distributed import local_tensor
from quaver.errors import NonFiniteError
from quaver.low_precision import MasterWeight
from quaver.training import train
from quaver.training.step import train_step


def state(assembly) -> dict:
    """Everything that a step may move: masters, moments, codes, counters, router bias."""
    found = {f"master.{name}": t for name, t in masters(assembly.model).items()}
    for name, parameter in assembly.model.named_parameters():
        for key, value in assembly.optimizer.state.get(parameter, {}).items():
            found[f"{key}.{name}"] = local_tensor(value).clone()
        local = local_tensor(parameter)
        if isinstance(local, MasterWeight):
            found[f"refreshes.{name}"] = torch.tensor(local.state.refreshes)
            for field, tensor in local.physical.items():
                found[f"{field}.{name}"] = tensor.clone()
    for name, buffer in assembly.model.named_buffers():
        found[f"buffer.{name}"] = buffer.clone()
    return found


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("fmt", ["bf16", "mxfp8", "hif8"])
def test_a_non_finite_step_moves_nothing(micro, fmt: str) -> None:
    assembly = build(micro(fmt))
    good = batches(micro(fmt), 2)
    train_step(assembly, good[:1], lr=1e-3, clip_norm=1.0)
    before = state(assembly)
    poison = next(p for n, p in assembly.model.named_parameters() if n.endswith("norm.weight"))
    kept = local_tensor(poison.detach()).clone()
    local_tensor(poison.detach()).fill_(math.inf)
    result = train_step(assembly, good[1:], lr=1e-3, clip_norm=1.0)
    local_tensor(poison.detach()).copy_(kept)
    assert result.skipped
    assert same(before, state(assembly))
    assert all(p.grad is None for p in assembly.model.parameters())
    after = train_step(assembly, good[1:], lr=1e-3, clip_norm=1.0)
    assert not after.skipped
    assert not same(before, state(assembly))


@pytest.mark.parametrize("fmt", ["bf16", "mxfp8"])
def test_a_raising_step_moves_nothing(micro, fmt: str) -> None:
    assembly = build(micro(fmt))
    sample = batches(micro(fmt), 2)
    train_step(assembly, sample[:1], lr=1e-3, clip_norm=1.0)
    before = state(assembly)

    def refuse(*_) -> None:
        raise RuntimeError("the device went away")

    handle = assembly.optimizer.register_step_pre_hook(refuse)
    with pytest.raises(RuntimeError, match="went away"):
        train_step(assembly, sample[1:], lr=1e-3, clip_norm=1.0)
    handle.remove()
    assert same(before, state(assembly))


@pytest.mark.parametrize("fmt", ["bf16", "mxfp8"])
@pytest.mark.parametrize("how", ["skipped", "second forward", "second backward", "optimizer"])
def test_a_failed_step_leaves_nothing_to_the_next(micro, monkeypatch, fmt: str, how: str) -> None:
    """Gradients and router counts of a step that failed are dropped: the next one is a fresh model's."""
    sample = batches(micro(fmt), 4)
    fresh, failing = build(micro(fmt)), build(micro(fmt))
    with monkeypatch.context() as broken:
        if how == "skipped":
            # finite weights and routing, and then a loss that is none
            broken.setattr("quaver.training.step.math.isfinite", lambda _: False)
            assert train_step(failing, sample[:2], lr=1e-3, clip_norm=1.0).skipped
        else:
            fail_in(failing, how, broken)
            with pytest.raises(RuntimeError, match="went away"):
                train_step(failing, sample[:2], lr=1e-3, clip_norm=1.0)
    assert all(p.grad is None for p in failing.model.parameters())
    assert all(not any(load.counts) for load in failing.router_bias.loads())
    wanted = train_step(fresh, sample[2:], lr=1e-3, clip_norm=1.0)
    assert train_step(failing, sample[2:], lr=1e-3, clip_norm=1.0) == wanted
    assert same(state(fresh), state(failing))


def fail_in(assembly, how: str, broken: pytest.MonkeyPatch) -> None:
    """Makes one moment of the next step raise."""
    import quaver.training.step as step

    def crash(*_) -> None:
        raise RuntimeError("the device went away")

    if how == "optimizer":
        broken.setattr(assembly.optimizer, "step", crash)
        return
    real, calls = step.token_nats, []

    def nats(model, batch):
        calls.append(1)
        if len(calls) == 1:
            return real(model, batch)
        if how == "second forward":
            crash()
        loss = real(model, batch)
        loss.register_hook(crash)
        return loss

    broken.setattr(step, "token_nats", nats)


def test_the_schedule_waits_for_a_skipped_step(micro, tmp_path, read_metrics, monkeypatch) -> None:
    import quaver.training.trainer as trainer

    real, calls = trainer.train_step, []

    def poisoned(assembly, sample, *, lr, clip_norm):
        calls.append(lr)
        if len(calls) != 2:
            return real(assembly, sample, lr=lr, clip_norm=clip_norm)
        norm = next(p for n, p in assembly.model.named_parameters() if n.endswith("norm.weight"))
        kept = local_tensor(norm.detach()).clone()
        local_tensor(norm.detach()).fill_(math.nan)
        try:
            return real(assembly, sample, lr=lr, clip_norm=clip_norm)
        finally:
            local_tensor(norm.detach()).copy_(kept)

    monkeypatch.setattr(trainer, "train_step", poisoned)
    schedule = ("optimizer.schedule.kind=linear", "optimizer.schedule.final_ratio=0.0")
    run = train(micro("mxfp8", *schedule), out=tmp_path / "run")
    lines = [line for line in read_metrics(run.dir) if "loss" in line]
    assert lines[1]["loss"] == "nan"
    assert [line["skipped"] for line in lines] == [0, 1, 1, 1]
    assert lines[1]["lr"] == lines[2]["lr"] > lines[3]["lr"]
    assert json.loads((run.dir / "ledger.json").read_text())["ok"] is True


def test_too_many_in_a_row_end_the_run(micro, tmp_path, monkeypatch) -> None:
    import quaver.training.trainer as trainer

    real = trainer.train_step

    def poisoned(assembly, sample, *, lr, clip_norm):
        norm = next(p for n, p in assembly.model.named_parameters() if n.endswith("norm.weight"))
        local_tensor(norm.detach()).fill_(math.nan)
        return real(assembly, sample, lr=lr, clip_norm=clip_norm)

    monkeypatch.setattr(trainer, "train_step", poisoned)
    with pytest.raises(NonFiniteError, match="2 steps in a row") as raised:
        train(micro("bf16", "training.nonfinite_limit=2"), out=tmp_path / "run")
    assert raised.value.exit_code == 3
    assert not list((tmp_path / "run").glob("checkpoints*"))
    assert (tmp_path / "run" / "config.yaml").exists()
