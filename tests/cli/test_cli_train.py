"""`quaver train` from end to end on a tiny run: folder, streams, JSON, failures, Ctrl-C."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ATTENTION = ("q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
Run = Callable[..., Any]
Tiny = Callable[..., Path]
Start = Callable[..., subprocess.Popen[str]]

RUN_FILES = {
    "config.yaml", "environment.json", "ledger.json", "metrics.jsonl", "replacement.json", "report.html",
}  # fmt: skip


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_from_end_to_end(quaver: Run, tiny: Tiny, home: Path) -> None:
    ended = quaver("train", tiny(), "training.steps=11", "--name", "trial")
    assert ended.code == 0, ended.err
    folder = home / "runs" / "trial"
    assert {path.name for path in folder.iterdir()} == RUN_FILES
    lines = lines_of(folder)
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 12))
    validations = [line for line in lines if "val_loss" in line]
    assert [line["step"] for line in validations] == [0, 6, 11]
    last = validations[-1]
    assert ended.out == (
        f"finished 11 steps: validation loss {last['val_loss']:.4f} nats/token, {last['val_bpb']:.3f} bits/byte\n"
        "folder  runs/trial\nreport  runs/trial/report.html\n"
    )
    err = ended.err.splitlines()
    assert "trial: building the model" in err
    (start,) = [line for line in err if "parameters" in line]
    # counted by hand: two layers of four projections, and one layer of experts with two stacked weights
    assert "mxfp8_e4m3/mx_block/floor@1 in 10 GEMM sites" in start
    assert "cpu, " in start
    assert "16 tokens/step" in start
    assert start.endswith("runs/trial")
    assert [line for line in err if line.startswith("trial: replaced")] == [
        *(f"trial: replaced   2  model.layers.*.self_attn.{name}" for name in ATTENTION),
        "trial: replaced   1  model.layers.*.mlp.experts",
    ]
    steps = [line for line in err if line.startswith("step ") and "/11" in line]
    assert [line.split()[1] for line in steps] == ["10/11", "11/11"]  # every tenth, and the last
    shown = [line for line in err if "nats/token" in line]
    assert [f"{line['val_loss']:.4f}" in text for line, text in zip(validations, shown, strict=True)] == [
        True
    ] * 3
    samples = [line for line in err if line.startswith("  sample: [red]def[/red] ")]
    assert len(samples) == 3


def test_a_taken_name_is_numbered_and_the_config_runs_again(quaver: Run, tiny: Tiny, home: Path) -> None:
    """The stored config is the run with its overrides, to the bit; run again it numbers its folder."""
    first = quaver("train", tiny(), "training.steps=2", "--name", "again", "--json")
    second = quaver("train", home / "runs" / "again" / "config.yaml", "--json")
    assert (first.code, second.code) == (0, 0), second.err
    documents = [json.loads(first.out), json.loads(second.out)]
    assert [document["dir"] for document in documents] == ["runs/again", "runs/again-2"]
    assert [document["steps"] for document in documents] == [2, 2]
    assert documents[0]["val_loss"] == documents[1]["val_loss"]
    assert documents[0]["report"] == "runs/again/report.html"
    assert (home / "runs/again/config.yaml").read_text() == (home / "runs/again-2/config.yaml").read_text()


def test_bf16_says_so_and_hits_nothing(quaver: Run, tiny: Tiny, home: Path) -> None:
    ended = quaver("train", tiny(), "low_precision.enabled=false", "training.steps=1", "--out", "plain")
    assert ended.code == 0, ended.err
    assert "BF16, low precision off" in ended.err
    assert json.loads((home / "plain" / "replacement.json").read_text()) == []
    ledger = json.loads((home / "plain" / "ledger.json").read_text())
    assert ledger == {"recipe": None, "ok": True, "entries": [], "idle_experts": []}


def test_steps_that_are_not_finite_end_the_run_with_3(quaver: Run, tiny: Tiny, home: Path) -> None:
    file = tiny(
        **{"training.nonfinite_limit": 2, "optimizer": {"lr": 1e38, "schedule": {"kind": "constant"}}}
    )
    ended = quaver("train", file, "--out", "broken")
    assert (ended.code, ended.out) == (3, "")
    assert "Traceback" not in ended.err
    assert "error: 2 steps in a row had a non-finite loss or gradient" in ended.err
    assert "skipped: not finite" in ended.err
    assert {path.name for path in (home / "broken").iterdir()} == RUN_FILES
    assert [line["skipped"] for line in lines_of(home / "broken") if "loss" in line][-2:] == [1, 2]


def test_a_gemm_around_the_backend_ends_the_run_with_3(
    quaver: Run, tiny: Tiny, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One dgrad computes the right numbers, but with a kernel that the backend did not count."""
    from quaver.backends.reference import ReferenceBackend

    inside = ReferenceBackend.low_precision_matmul

    def around(self: Any, left: Any, right: Any, **options: Any) -> Any:
        site = options["site"]
        if (site.fqn, site.gemm) == ("model.layers.1.self_attn.o_proj", "dgrad"):
            before = self.ledger.executed.copy()
            out = inside(self, left, right, **options)
            self.ledger.executed = before
            return out
        return inside(self, left, right, **options)

    monkeypatch.setattr(ReferenceBackend, "low_precision_matmul", around)
    ended = quaver("train", tiny(), "--out", "around")
    assert (ended.code, ended.out) == (3, "")
    assert "Traceback" not in ended.err
    assert "model.layers.1.self_attn.o_proj" in ended.err
    assert "dgrad" in ended.err
    assert json.loads((home / "around" / "ledger.json").read_text())["ok"] is False


def test_an_error_that_nobody_foresaw_keeps_its_traceback(
    quaver: Run, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quaver.training import trainer

    def fail(*args: Any, **options: Any) -> Any:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(trainer, "train_step", fail)
    ended = quaver("train", tiny(), "--out", "unlucky")
    assert ended.code == 3
    assert "Traceback (most recent call last)" in ended.err
    assert ended.err.rstrip().endswith("RuntimeError: out of luck")


def test_help_config_needs_no_config(quaver: Run) -> None:
    from quaver.config import help_config

    ended = quaver("train", "--help-config")
    assert (ended.code, ended.err) == (0, "")
    assert ended.out == help_config() + "\n"


def test_what_a_library_prints_does_not_reach_the_document(
    quaver: Run, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quaver.training import trainer

    real = trainer.train_step

    def chatty(*args: Any, **options: Any) -> Any:
        print("a library's chatter")
        return real(*args, **options)

    monkeypatch.setattr(trainer, "train_step", chatty)
    ended = quaver("train", tiny(), "--json", "training.steps=1")
    assert ended.code == 0, ended.err
    assert json.loads(ended.out)["steps"] == 1
    assert "a library's chatter" in ended.err


# What a process does, seen from outside ------------------------------------------------------------------


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """start(file, ...): a process that trains; one that hangs is killed, which no assertion survives."""
    ends: list[Callable[[], object]] = []

    def begin(file: Path, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "quaver", "train", str(file), *arguments]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        timer = threading.Timer(240, process.kill)
        timer.start()
        ends.extend([timer.cancel, process.kill, process.wait])
        return process

    yield begin
    for end in ends:
        end()


def read_until(process: subprocess.Popen[str], words: str) -> str:
    """stderr up to the first line that holds the words."""
    assert process.stderr is not None
    seen = ""
    for line in process.stderr:
        seen += line
        if words in line:
            return seen
    raise AssertionError(f"{words!r} never came:\n{seen}")


def test_stdout_is_one_document_and_stderr_has_no_noise(start: Start, tiny: Tiny, home: Path) -> None:
    process = start(tiny(), "--json", "training.steps=2")
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    document = json.loads(out)
    assert set(document) == {"dir", "steps", "val_loss", "interrupted", "report"}
    assert (document["dir"], document["steps"], document["interrupted"]) == ("runs/tiny", 2, False)
    known = ("tiny: ", "step ", "  sample: ", "quaver: the CPU kernels are being compiled")  # the last if that is slow
    assert [line for line in err.splitlines() if not line.startswith(known)] == []
    assert "\x1b" not in err


def test_ctrl_c_ends_after_the_step_with_the_folder_complete(start: Start, tiny: Tiny, home: Path) -> None:
    process = start(tiny(), "--out", "run", "training.steps=100000", "training.validate_every=0")
    read_until(process, "step 10/")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "tiny: stopping after this step (Ctrl-C again stops at once)" in err
    assert "Traceback" not in err
    folder = home / "run"
    assert {path.name for path in folder.iterdir()} == RUN_FILES
    lines = lines_of(folder)
    steps = [line["step"] for line in lines if "loss" in line]
    assert steps == list(range(1, len(steps) + 1))
    assert 10 <= len(steps) < 100000
    assert [line["step"] for line in lines if "val_loss" in line] == [len(steps)]
    assert json.loads((folder / "ledger.json").read_text())["ok"] is True
    assert out.startswith(f"stopped after {len(steps)} steps: validation loss ")


def test_a_second_ctrl_c_stops_at_once_with_130(start: Start, tiny: Tiny, home: Path) -> None:
    """One step of 3000 micro-steps would go on for long."""
    process = start(tiny(), "--out", "run", "gradient_accumulation_steps=3000", "training.validate_every=0")
    read_until(process, "parameters")
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    read_until(process, "stopping after this step")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert (out, err) == ("", "stopped: run is incomplete\n")
    assert lines_of(home / "run") == []


def test_ctrl_c_before_the_run_leaves_nothing(
    quaver: Run, tiny: Tiny, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quaver.training import trainer

    def interrupt(*args: Any, **options: Any) -> Any:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(trainer, "prepare_data", interrupt)
    # a job in the background, as a CI may be, hands on to its children that Ctrl-C is ignored
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        ended = quaver("train", tiny())
    finally:
        signal.signal(signal.SIGINT, before)
    assert (ended.code, ended.out, ended.err) == (130, "", "stopped\n")
    assert list(home.iterdir()) == []


# Dry run -------------------------------------------------------------------------------------------------


def test_dry_run_tells_everything_and_writes_nothing(
    quaver: Run, tiny: Tiny, home: Path, tmp_path: Path
) -> None:
    file = tiny(**{"model.freeze": ["model.embed_tokens.*"]})
    ended = quaver("train", file, "--dry-run", "--json", "--nproc", "2")
    assert (ended.code, ended.err) == (0, "")
    document = json.loads(ended.out)
    hits = {entry["pattern"]: len(entry["hits"]) for entry in document["replacements"]}
    assert hits == {
        "model.layers.*.self_attn.q_proj": 2,
        "model.layers.*.self_attn.kv_a_proj_with_mqa": 2,
        "model.layers.*.self_attn.kv_b_proj": 2,
        "model.layers.*.self_attn.o_proj": 2,
        "model.layers.*.mlp.experts": 1,
    }
    # at two ranks: q 64/2, kv_b 64/2 and the experts are aligned; kv_a 48/2 and o 32/2 cut a block of 32
    assert document["verdicts"] == {"aligned": 2 * 2 + 2, "exact": 2 * 2}
    (source,) = document["sources"]
    sizes = [path.stat().st_size for path in (tmp_path / "corpus").iterdir()]
    assert (source["files"], source["bytes"], source["weight"]) == (12, sum(sizes), 1.0)
    assert document["frozen"] == [{"pattern": "model.embed_tokens.*", "hits": ["model.embed_tokens.weight"]}]
    assert document["tokens_per_step"] == 1 * 16 * 2
    table = quaver("train", file, "--dry-run")
    assert (table.code, table.err) == (0, "")
    assert "12 files" in table.out
    assert "1 rank: 10 aligned" in table.out
    assert list(home.iterdir()) == []
    assert not (tmp_path / "cache").exists()


def test_dry_run_finds_what_the_run_would_end_with(quaver: Run, tiny: Tiny, home: Path) -> None:
    illegal = quaver("train", tiny(), "--dry-run", "--nproc", "3")
    assert (illegal.code, illegal.out) == (2, "")
    assert "cannot be sharded over 3 ranks" in illegal.err
    taken = quaver("train", tiny(), "--dry-run", "--out", home)
    assert taken.code == 2
    assert "exists already" in taken.err
