"""Checkpoints that were damaged, disks that are full or read-only: a clear error or the previous good checkpoint."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers.micro import micro_document
from helpers.saved import checkpoint_of, differing, metric_lines, saved_tensors

from quaver.errors import CheckpointError, ConfigError, RunFolderError
from quaver.training import Silent, train

STEPS = 6
OVERRIDES = ("training.steps=6", "training.validate_every=3", "checkpoint.every=2")


class Told(Silent):
    """Keeps what a run says."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def on_message(self, text: str) -> None:
        self.messages.append(text)


@pytest.fixture(scope="module")
def micro_run(corpus, tmp_path_factory):
    """micro_run(out, *overrides, resume=...) -> what the run said."""
    cache = str(tmp_path_factory.mktemp("cache"))

    def run(out: Path, *overrides: str, resume: bool = False) -> list[str]:
        told = Told()
        document = micro_document("mxfp8", str(corpus), cache)
        train(document, [*OVERRIDES, *overrides], out=out, resume=resume, observer=told)
        return told.messages

    return run


@pytest.fixture(scope="module")
def runs(micro_run, tmp_path_factory) -> tuple[Path, Path]:
    """An unbroken run, and one that stopped after step 4, with the checkpoints of steps 2 and 4."""
    root = tmp_path_factory.mktemp("runs")
    micro_run(root / "whole")
    micro_run(root / "stopped", "training.stop_after=4")
    return root / "whole", root / "stopped"


@pytest.fixture
def stopped(runs, tmp_path) -> Path:
    return shutil.copytree(runs[1], tmp_path / "run")


def check_ends_equal(run: Path, whole: Path) -> None:
    assert metric_lines(run) == metric_lines(whole)
    assert (
        differing(saved_tensors(checkpoint_of(run, STEPS)), saved_tensors(checkpoint_of(whole, STEPS))) == []
    )


def shard_of(checkpoint: Path) -> Path:
    return max(checkpoint.glob("*.distcp"), key=lambda file: file.stat().st_size)


def truncate(checkpoint: Path) -> str:
    file = shard_of(checkpoint)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    return f"{file.name} has "


def flip(checkpoint: Path) -> str:
    file = shard_of(checkpoint)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(bytes(data))
    return f"{file.name} was changed"


def lose_shard(checkpoint: Path) -> str:
    file = shard_of(checkpoint)
    file.unlink()
    return f"{file.name} is missing"


def lose_manifest(checkpoint: Path) -> str:
    (checkpoint / "manifest.json").unlink()
    return "there is no manifest"


DAMAGES = [truncate, flip, lose_shard, lose_manifest]


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_checkpoint_before_a_damaged_one_is_taken(
    micro_run, runs, stopped, damage: Callable[[Path], str]
) -> None:
    reason = damage(checkpoint_of(stopped, 4))
    told = micro_run(stopped, resume=True)
    assert [line for line in told if line.startswith(f"skipped step-00000004: {reason}")], told
    assert "resuming from step-00000002" in told
    check_ends_equal(stopped, runs[0])


@pytest.mark.parametrize("damage", DAMAGES)
def test_nothing_usable_is_an_error_that_says_why(micro_run, stopped, damage: Callable[[Path], str]) -> None:
    before = (stopped / "metrics.jsonl").read_text()
    reasons = [damage(checkpoint_of(stopped, step)) for step in (2, 4)]
    with pytest.raises(CheckpointError, match="no checkpoint is usable") as raised:
        micro_run(stopped, resume=True)
    assert raised.value.exit_code == 2
    assert all(reason in str(raised.value) for reason in reasons)
    assert (stopped / "metrics.jsonl").read_text() == before


@pytest.mark.parametrize("damage", DAMAGES)
def test_another_run_does_not_start_from_a_damaged_one(
    micro_run, stopped, tmp_path, damage: Callable[[Path], str]
) -> None:
    checkpoint = checkpoint_of(stopped, 4)
    reason = damage(checkpoint)
    with pytest.raises(CheckpointError) as raised:
        micro_run(tmp_path / "other", f"checkpoint.load_from={checkpoint}")
    assert raised.value.exit_code == 2
    assert reason in str(raised.value)
    assert not (tmp_path / "other" / "metrics.jsonl").exists()


def test_latest_that_points_nowhere_does_not_hide_what_is_there(micro_run, runs, stopped) -> None:
    (stopped / "checkpoints" / "latest").write_text("step-00000099\n")
    told = micro_run(stopped, resume=True)
    assert "skipped latest: it points to 'step-00000099', which is not there" in told
    assert "resuming from step-00000004" in told
    check_ends_equal(stopped, runs[0])


def test_latest_without_any_checkpoint_is_an_error(micro_run, stopped) -> None:
    for step in (2, 4):
        shutil.rmtree(checkpoint_of(stopped, step))
    with pytest.raises(CheckpointError, match="'step-00000004', which is not there") as raised:
        micro_run(stopped, resume=True)
    assert raised.value.exit_code == 2


@pytest.fixture
def disk(tmp_path) -> Iterator[Callable[..., Path]]:
    """disk("size=4m") -> a small disk; disk("remount,ro") changes it."""
    folder, mounted = tmp_path / "disk", []
    folder.mkdir()

    def mount(options: str) -> Path:
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
            pytest.skip("mounting a tmpfs is not allowed here")
        mounted.append(options)
        return folder

    yield mount
    if mounted:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("asynchronous", ["false", "true"])
def test_a_full_disk_leaves_the_last_good_checkpoint(micro_run, runs, disk, asynchronous: str) -> None:
    """There is room for one checkpoint of about 3 MB, not for two."""
    run = disk("size=5m") / "run"
    with pytest.raises(CheckpointError, match="No space left on device") as raised:
        micro_run(run, f"checkpoint.asynchronous={asynchronous}")
    assert raised.value.exit_code == 3
    assert "untouched" in str(raised.value)
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["latest", "step-00000002"]
    disk("remount,size=64m")
    told = micro_run(run, resume=True)
    assert "resuming from step-00000002" in told
    check_ends_equal(run, runs[0])


def test_a_read_only_checkpoints_folder_is_told_at_the_save(micro_run, runs, stopped, disk) -> None:
    kept = shutil.move(stopped / "checkpoints", disk("size=64m") / "checkpoints")
    (stopped / "checkpoints").symlink_to(kept)
    disk("remount,ro")
    with pytest.raises(CheckpointError, match="Read-only file system") as raised:
        micro_run(stopped, resume=True)
    assert raised.value.exit_code == 3
    assert "checkpoints" in str(raised.value)
    disk("remount,rw")
    micro_run(stopped, resume=True)
    check_ends_equal(stopped, runs[0])


def test_a_read_only_run_folder_is_told_before_anything_is_trained(micro_run, runs, disk) -> None:
    run = shutil.copytree(runs[1], disk("size=64m") / "run")
    disk("remount,ro")
    with pytest.raises(ConfigError, match="Read-only file system") as raised:
        micro_run(run, resume=True)
    assert str(run) in str(raised.value)
    disk("remount,rw")
    micro_run(run, resume=True)
    check_ends_equal(run, runs[0])


class Filler(Silent):
    """Takes all room that is left on a disk, once the first step is done."""

    def __init__(self, disk: Path) -> None:
        self.file = disk / "filler"

    def on_step(self, step: int, *_) -> None:
        if step == 1:
            with self.file.open("wb", buffering=0) as file, contextlib.suppress(OSError):
                while True:
                    file.write(bytes(1024))


def test_metrics_on_a_full_disk_end_the_run_by_name(corpus, tmp_path, disk, read_metrics) -> None:
    """Lines go on into the page that is there already, then the disk is full; what was written stays readable."""
    folder = disk("size=1m")
    document = micro_document("bf16", str(corpus), str(tmp_path / "cache"))
    filler = Filler(folder)
    with pytest.raises(RunFolderError, match="No space left on device") as raised:
        train(document, ["training.steps=60"], out=folder / "run", observer=filler)
    assert raised.value.exit_code == 3
    assert str(folder / "run" / "metrics.jsonl") in str(raised.value)
    whole = (folder / "run" / "metrics.jsonl").read_text().splitlines()[:-1]
    assert 10 < len(whole) < 60
    filler.file.unlink()
    train(document, ["training.steps=60"], out=folder / "run", resume=True)  # nothing was saved: it starts anew
    lines = read_metrics(folder / "run")
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 61))
