"""A stopped, killed and resumed run is the unbroken one, bit for bit; and a run starts from what another one left."""

from __future__ import annotations

import json
import math
import shutil

import pytest
import torch
from test_equalities import masters

import quaver
from quaver.distributed import local_tensor
from quaver.errors import CheckpointError
from quaver.low_precision import MasterWeight
from quaver.training import Silent, Trainer, train
from quaver.training.export import export_run
from quaver.training.progress import Progress

OVERRIDES = (
    "training.steps=5",
    "gradient_accumulation_steps=2",
    "training.validate_every=2",
    "checkpoint.every=2",
    "optimizer.schedule={kind: cosine, warmup_steps: 2}",
)


def end_state(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Masters, moments, eight-bit codes and router biases."""
    assembly = trainer.assembly
    found = {f"{name}.master": value for name, value in masters(assembly.model).items()}
    for name, parameter in assembly.model.named_parameters():
        for key, value in assembly.optimizer.state[parameter].items():
            found[f"{name}.{key}"] = local_tensor(value)
    return found | codes(assembly.model) | dict(assembly.model.named_buffers())


def codes(model) -> dict[str, torch.Tensor]:
    weights = {name: local_tensor(p) for name, p in model.named_parameters()}
    return {
        f"{name}.{field}": tensor.clone()
        for name, weight in weights.items()
        if isinstance(weight, MasterWeight)
        for field, tensor in weight.physical.items()
    }


def differing(a: dict, b: dict) -> list[str]:
    return sorted(a.keys() ^ b.keys()) + [k for k in a.keys() & b.keys() if not torch.equal(a[k], b[k])]


def without_speed(lines: list[dict]) -> list[dict]:
    return [{k: v for k, v in line.items() if k != "tokens_per_s"} for line in lines]


@pytest.mark.parametrize("fmt", ["bf16", "mxfp8", "hif8"])
def test_stopped_and_resumed_twice_equals_unbroken(micro, tmp_path, read_metrics, fmt: str) -> None:
    """Stopped where no validation and no checkpoint is due, and where both are."""
    whole = Trainer(micro(fmt, *OVERRIDES), Silent())
    whole.run(tmp_path / "whole")
    out = tmp_path / "broken"
    train(micro(fmt, *OVERRIDES, "training.stop_after=1"), out=out)
    stopped = train(micro(fmt, *OVERRIDES, "training.stop_after=4"), out=out, resume=True)
    assert stopped.steps == 4
    resumed = Trainer(micro(fmt, *OVERRIDES), Silent())
    assert resumed.run(out, resume=True).steps == 5
    assert resumed.started_at == 4
    assert differing(end_state(whole), end_state(resumed)) == []
    lines = read_metrics(tmp_path / "whole")
    assert [line["step"] for line in lines] == [0, 1, 2, 2, 3, 4, 4, 5, 5]
    assert without_speed(read_metrics(out)) == without_speed(lines)
    ledger = json.loads((out / "ledger.json").read_text())
    assert ledger["ok"] is True
    assert {e["count"] for e in ledger["entries"]} == ({2} if fmt != "bf16" else set())


def test_a_crashed_run_goes_on_from_its_checkpoint_and_its_metrics_are_cut(
    micro, tmp_path, read_metrics, monkeypatch
) -> None:
    import quaver.training.trainer as trainer

    config = micro("mxfp8", *OVERRIDES)
    whole = Trainer(config, Silent())
    whole.run(tmp_path / "whole")
    out, real, calls = tmp_path / "broken", trainer.train_step, []

    def crash(*args, **rest):
        calls.append(1)
        if len(calls) == 4:
            raise RuntimeError("the power went away")
        return real(*args, **rest)

    with monkeypatch.context() as broken:
        broken.setattr(trainer, "train_step", crash)
        with pytest.raises(RuntimeError, match="power"):
            train(config, out=out)
    assert [line["step"] for line in read_metrics(out)] == [0, 1, 2, 2, 3]
    with (out / "metrics.jsonl").open("a") as half:
        half.write('{"step": 4, "lo')
    again = Trainer(config, Silent())
    again.run(out, resume=True)
    assert again.started_at == 2
    assert without_speed(read_metrics(out)) == without_speed(read_metrics(tmp_path / "whole"))
    assert differing(end_state(whole), end_state(again)) == []


def test_nothing_saved_yet_starts_anew(micro, tmp_path, read_metrics) -> None:
    told = []

    class Listening(Silent):
        def on_message(self, message: str) -> None:
            told.append(message)

    train(micro("bf16", "training.steps=2"), out=tmp_path / "whole")
    out = tmp_path / "run"
    train(micro("bf16", "training.steps=2", "training.stop_after=1"), out=out)
    train(micro("bf16", "training.steps=2"), out=out, resume=True, observer=Listening())
    assert any("no complete checkpoint" in message for message in told)
    assert without_speed(read_metrics(out)) == without_speed(read_metrics(tmp_path / "whole"))


class FirstMasters:
    """Masters and codes as they are when the first step begins."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import quaver.training.trainer as trainer

        real, self.masters, self.codes, self.anew = trainer.train_step, {}, {}, {}

        def look(assembly, *args, **rest):
            if not self.masters:
                self.masters, self.codes = masters(assembly.model), codes(assembly.model)
                if assembly.policy is not None:
                    quaver.refresh(assembly.model)
                    self.anew = codes(assembly.model)
            return real(assembly, *args, **rest)

        monkeypatch.setattr(trainer, "train_step", look)


@pytest.fixture
def bf16_run(micro, tmp_path) -> Trainer:
    """A finished BF16 run whose masters are no BF16 values any more."""
    trainer = Trainer(micro("bf16", "checkpoint.every=2", "training.steps=3"), Silent())
    trainer.run(tmp_path / "source")
    return trainer


@pytest.mark.parametrize("fmt", ["mxfp8", "hif8"])
def test_load_from_hands_over_the_masters_of_another_recipe(
    micro, tmp_path, monkeypatch, bf16_run, fmt: str
) -> None:
    first = FirstMasters(monkeypatch)
    wanted = f"checkpoint.load_from={tmp_path / 'source'}"
    run = train(micro(fmt, wanted, "training.steps=1", "seed=8"), out=tmp_path / "run")
    assert run.steps == 1
    assert differing(masters(bf16_run.assembly.model), first.masters) == []
    assert first.codes
    assert differing(first.codes, first.anew) == []  # quantised from what was loaded


@pytest.mark.parametrize("fmt", ["bf16", "mxfp8", "hif8"])
@pytest.mark.parametrize("experts", ["per_expert", "fused"])
def test_init_from_takes_the_masters_of_an_exported_folder(
    micro, tmp_path, monkeypatch, bf16_run, fmt: str, experts: str
) -> None:
    folder = tmp_path / "exported"
    export_run(tmp_path / "source", folder, dtype="float32", experts=experts, on_message=lambda _: None)
    first = FirstMasters(monkeypatch)
    train(micro(fmt, f"model.init_from={folder}", "training.steps=1", "seed=8"), out=tmp_path / "run")
    ended = masters(bf16_run.assembly.model)
    assert any(not torch.equal(m, m.bfloat16().float()) for m in ended.values())
    assert differing(ended, first.masters) == []
    assert differing(first.codes, first.anew) == []
    assert (fmt == "bf16") == (not first.codes)


def test_export_needs_neither_the_corpus_nor_the_cache(micro, tmp_path) -> None:
    """The run keeps its trained tokeniser; what goes out is that, to the byte."""
    cache = tmp_path / "cache"
    changes = ("data.tokenizer=bpe", "data.bpe_vocab_size=260", f"data.cache_dir={cache}")
    train(micro("bf16", *changes, "checkpoint.every=1", "training.steps=1"), out=tmp_path / "run")
    shutil.rmtree(cache)
    cache.write_text("")  # no folder can be made here any more
    export_run(tmp_path / "run", tmp_path / "out", dtype="bfloat16", experts="fused", on_message=print)
    kept = (tmp_path / "run" / "tokenizer.json").read_bytes()
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == kept
    assert b'"merges"' in kept


def test_export_refuses_a_tokenizer_that_the_run_was_not_trained_with(micro, tmp_path) -> None:
    changes = ("data.tokenizer=bpe", "data.bpe_vocab_size=260")
    train(micro("bf16", *changes, "checkpoint.every=1", "training.steps=1"), out=tmp_path / "run")
    file = tmp_path / "run" / "tokenizer.json"
    file.write_text(file.read_text() + "\n")
    with pytest.raises(CheckpointError, match=r"tokeni[sz]er"):
        export_run(tmp_path / "run", tmp_path / "out", dtype="bfloat16", experts="fused", on_message=print)


def test_progress_survives_json_to_the_bit() -> None:
    held = Progress(5, 4, 320, 1, 0, 4, 5.1234567890123456, 0.1 + 0.2)
    assert Progress.from_json(json.loads(json.dumps(held.to_json()))) == held
    fresh = Progress.from_json(json.loads(json.dumps(Progress().to_json())))
    assert math.isnan(fresh.val_loss)
    assert (fresh.step, fresh.validated_step) == (0, -1)


@pytest.mark.parametrize(
    "change",
    [
        {"step": None},
        {"step": "four"},
        {"step": "4"},
        {"step": 4.7},
        {"step": math.inf},
        {"step": True},
        {"tokens": [1]},
        {"val_loss": "0x1p99999"},
        {"val_loss": 0.5},
        {"val_loss": "zero point five"},
        {"val_bpb": None},
        {"unknown": 1},
    ],
    ids=str,
)
def test_unreadable_counters_are_a_checkpoint_error(change: dict) -> None:
    with pytest.raises(CheckpointError, match="counters in the checkpoint are not readable") as raised:
        Progress.from_json(Progress().to_json() | change)
    assert raised.value.exit_code == 2
    assert raised.value.where == "state.json: progress"


@pytest.mark.parametrize("field", ["step", "updates", "skipped_in_a_row", "val_bpb"])
def test_missing_counters_are_a_checkpoint_error(field: str) -> None:
    saved = Progress().to_json()
    del saved[field]
    with pytest.raises(CheckpointError, match="not readable: fields"):
        Progress.from_json(saved)
