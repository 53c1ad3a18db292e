"""A resume that is refused, or has nothing to do, leaves the folder as it was; one that differs says in what."""

import json
import shutil
from pathlib import Path

import pytest
from helpers.saved import metric_lines

from quaver.errors import CheckpointError, ConfigError
from quaver.training import Silent, train
from quaver.training.export import export_run

STOPPED = ("training.steps=4", "checkpoint.every=2", "training.stop_after=2")
WHOLE = ("training.steps=4", "checkpoint.every=2")


class Told(Silent):
    def __init__(self) -> None:
        self.messages: list[str] = []

    def on_message(self, message: str) -> None:
        self.messages.append(message)


def contents(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.fixture
def stopped(micro, tmp_path) -> Path:
    return train(micro("mxfp8", *STOPPED), out=tmp_path / "run").dir


@pytest.mark.parametrize(
    ("fmt", "change", "said"),
    [
        ("mxfp8", "model.config_overrides.hidden_size=128", "does not fit the model"),
        ("mxfp8", "model.config_overrides.routed_scaling_factor=3.0", "routed_scaling_factor: 1.0 there, 3.0 here"),
        ("mxfp8", "model.config_overrides.rope_theta=77.0", "of another model, though its shapes fit"),
        ("mxfp8", "seed=8", "data"),
        ("mxfp8", "data.tokenizer=bpe", "tokeniser"),
        ("mxfp8", "low_precision.scale_rule=rceil", "trained in mxfp8_e4m3/mx_block/floor@1"),
        ("hif8", "training.validate_every=0", "this config says hif8/current@1"),
        ("bf16", "training.validate_every=0", "this config says high precision"),
    ],
)
def test_a_refused_resume_changes_no_file(micro, stopped, fmt: str, change: str, said: str) -> None:
    before = contents(stopped)
    changes = [change, *(["data.bpe_vocab_size=260"] if "bpe" in change else [])]
    with pytest.raises((CheckpointError, ConfigError), match=said) as raised:
        train(micro(fmt, *WHOLE, *changes), out=stopped, resume=True)
    assert raised.value.exit_code == 2
    assert contents(stopped) == before


def test_what_changes_is_named_with_both_values(micro, stopped) -> None:
    told = Told()
    train(micro("mxfp8", *WHOLE, "optimizer.lr=0.002"), out=stopped, resume=True, observer=told)
    (message,) = [m for m in told.messages if "the config given now holds" in m]
    assert "training.stop_after 2 -> None" in message
    assert "optimizer.lr 0.003 -> 0.002" in message
    assert "optimizer.lr: 0.002" in (stopped / "config.yaml").read_text().replace("  lr", "optimizer.lr")


def test_a_resume_with_nothing_to_train_leaves_the_evidence_alone(micro, tmp_path) -> None:
    run = train(micro("mxfp8", *WHOLE), out=tmp_path / "run").dir
    before = contents(run)
    told = Told()
    again = train(micro("mxfp8", *WHOLE), out=run, resume=True, observer=told)
    assert again.steps == 4
    assert any("nothing to train" in message for message in told.messages)
    after = contents(run)
    assert after.keys() == before.keys()
    changed = {name for name in before if after[name] != before[name]}
    assert changed <= {"metrics.jsonl", "report.html", "checkpoints.log"}
    assert again.val_loss == json.loads(before["metrics.jsonl"].splitlines()[-1])["val_loss"]


def test_a_ledger_says_where_it_begins(micro, stopped) -> None:
    train(micro("mxfp8", *WHOLE), out=stopped, resume=True)
    ledger = json.loads((stopped / "ledger.json").read_text())
    assert ledger["resumed_from"] == 2
    assert {entry["count"] for entry in ledger["entries"]} == {2}


def test_a_finished_run_without_checkpoints_is_not_trained_again(micro, tmp_path) -> None:
    run = train(micro("bf16", "training.steps=2"), out=tmp_path / "run").dir
    before = contents(run)
    with pytest.raises(CheckpointError, match="saved no checkpoint to go on from") as raised:
        train(micro("bf16", "training.steps=2"), out=run, resume=True)
    assert raised.value.exit_code == 2
    assert contents(run) == before


def test_a_resume_of_nothing_says_so(micro, tmp_path) -> None:
    told = Told()
    train(micro("bf16", "training.steps=1"), out=tmp_path / "never", resume=True, observer=told)
    assert any("nothing to resume" in message and "never" in message for message in told.messages)


def test_another_batch_size_is_told(micro, stopped) -> None:
    told = Told()
    train(micro("mxfp8", *WHOLE, "training.micro_batch_size=1"), out=stopped, resume=True, observer=told)
    (message,) = [m for m in told.messages if "a step has" in m]
    assert "32 tokens now, and had 64" in message
    assert "gradient_accumulation_steps=2 would keep" in message


def test_lines_that_were_lost_are_told(micro, stopped) -> None:
    lines = (stopped / "metrics.jsonl").read_text().splitlines(keepends=True)
    kept = [line for line in lines if '"step": 1,' not in line]
    (stopped / "metrics.jsonl").write_text("".join(kept))
    told = Told()
    train(micro("mxfp8", *WHOLE), out=stopped, resume=True, observer=told)
    assert any("lacks the lines of 1 steps, the first 1" in message for message in told.messages)
    assert [line["step"] for line in metric_lines(stopped) if "loss" in line] == [2, 3, 4]


def test_metrics_are_flushed_before_a_checkpoint_is_renamed(micro, tmp_path, monkeypatch) -> None:
    import os

    real, events = os.fsync, []

    def fsync(handle: int) -> None:
        events.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name)
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    train(micro("bf16", "training.steps=1", "checkpoint.every=1"), out=tmp_path / "run")
    assert events.index("metrics.jsonl") < len(events) - 1 - events[::-1].index("checkpoints")
    assert "config.yaml.part" in events


def test_export_and_resume_do_not_need_where_the_weights_came_from(micro, tmp_path) -> None:
    first = train(micro("bf16", "checkpoint.every=1", "training.steps=1"), out=tmp_path / "first").dir
    export_run(first, tmp_path / "hf", dtype="float32", experts="fused", on_message=print)
    source = f"model.init_from={tmp_path / 'hf'}"
    run = train(micro("bf16", *STOPPED, source), out=tmp_path / "run").dir
    shutil.rmtree(tmp_path / "hf")
    assert train(micro("bf16", *WHOLE, source), out=run, resume=True).steps == 4
    done = export_run(run, tmp_path / "out", dtype="bfloat16", experts="fused", on_message=print)
    assert done.step == 4
    assert "init_from: " + str(tmp_path / "hf") in (run / "config.yaml").read_text()


def test_export_takes_one_checkpoint_by_name(micro, tmp_path) -> None:
    run = train(micro("bf16", *WHOLE), out=tmp_path / "run").dir
    older = run / "checkpoints" / "step-00000002"
    done = export_run(older, tmp_path / "out", dtype="bfloat16", experts="fused", on_message=print)
    assert (done.step, done.checkpoint) == (2, older)
    assert done.as_json()["step"] == 2
    with pytest.raises(ConfigError, match="not the folder of a run"):
        export_run(run / "checkpoints", tmp_path / "no", dtype="bfloat16", experts="fused", on_message=print)


def test_export_refuses_a_config_of_another_model(micro, tmp_path) -> None:
    run = train(micro("bf16", *WHOLE), out=tmp_path / "run").dir
    text = (run / "config.yaml").read_text()
    assert "routed_scaling_factor: 1.0" in text
    (run / "config.yaml").write_text(text.replace("routed_scaling_factor: 1.0", "routed_scaling_factor: 2.0"))
    with pytest.raises(CheckpointError, match=r"routed_scaling_factor: 1\.0 there, 2\.0 here"):
        export_run(run, tmp_path / "out", dtype="bfloat16", experts="fused", on_message=print)


def test_a_start_from_nowhere_is_told_before_a_folder_is_made(micro, tmp_path) -> None:
    (tmp_path / "empty").mkdir()
    for source, said in (("nope", "there is no such path"), ("empty", "there is no checkpoint")):
        with pytest.raises(CheckpointError, match=said) as raised:
            train(micro("bf16", f"checkpoint.load_from={tmp_path / source}"), out=tmp_path / "run")
        assert raised.value.exit_code == 2
        assert not (tmp_path / "run").exists()


def test_two_sources_of_weights_are_refused(micro, tmp_path) -> None:
    both = (f"checkpoint.load_from={tmp_path}", f"model.init_from={tmp_path}")
    with pytest.raises(ConfigError, match="both name where the weights come from"):
        train(micro("bf16", *both), out=tmp_path / "run")


def test_the_error_of_a_step_is_told_before_that_of_a_save(micro, tmp_path, monkeypatch) -> None:
    import quaver.checkpoint.manager as manager
    import quaver.training.trainer as trainer

    def fails(*_) -> None:
        raise CheckpointError("disk gone")

    real, calls = trainer.train_step, []

    def crash(*args, **rest):
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("the step went wrong")
        return real(*args, **rest)

    monkeypatch.setattr(manager, "finish_writing", fails)
    monkeypatch.setattr(manager.CheckpointManager, "poll", lambda self: None)
    monkeypatch.setattr(trainer, "train_step", crash)
    told = Told()
    with pytest.raises(RuntimeError, match="the step went wrong"):
        train(
            micro("bf16", *WHOLE, "checkpoint.every=1", "checkpoint.asynchronous=true"),
            out=tmp_path / "run",
            observer=told,
        )
    assert any("the save in flight failed too: disk gone" in message for message in told.messages)
