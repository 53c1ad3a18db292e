"""`quaver train --nproc 2` and torchrun: one terminal, signals, dead ranks, wrong configs, exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from helpers.micro import micro_document
from helpers.ranks import free_port
from helpers.saved import checkpoint_of

pytestmark = pytest.mark.slow
MATRIX = pytest.mark.skipif(not os.environ.get("QUAVER_MATRIX"), reason="part of `make test-matrix`")
WAIT = 120
LIMIT = 10  # seconds that a dead rank may be mourned


@pytest.fixture
def write(corpus: Path, tmp_path: Path, tmp_path_factory) -> Callable[..., Path]:
    """write({"training": {...}}) -> a config file."""
    cache = tmp_path_factory.getbasetemp() / "launch-cache"

    def made(changes: dict | None = None) -> Path:
        document = micro_document("mxfp8", str(corpus), str(cache))
        for section, values in (changes or {}).items():
            document[section] = {**document.get(section, {}), **values}
        file = tmp_path / "micro.yaml"
        file.write_text(yaml.safe_dump(document))
        return file

    return made


class Started:
    """A command that runs in a session of its own, its streams in files."""

    def __init__(self, folder: Path, *command: object) -> None:
        self.out, self.err = folder / "stdout", folder / "stderr"
        environment = {k: v for k, v in os.environ.items() if k not in ("WORLD_SIZE", "RANK")}
        with self.out.open("w") as out, self.err.open("w") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *map(str, command)],
                stdout=out,
                stderr=err,
                env={**environment, "OMP_NUM_THREADS": "1", "TORCHAO_SKIP_LOADING_SO_FILES": "1"},
                start_new_session=True,
            )

    def ranks(self) -> dict[int, int]:
        """Rank -> pid of the launcher's processes."""
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        found = {}
        for child in children:
            words = dict(
                word.split("=", 1) for word in Path(f"/proc/{child}/environ").read_text().split("\0") if word
            )
            found[int(words["RANK"])] = int(child)
        return found

    def wait(self, seconds: float = WAIT) -> int:
        return self.process.wait(seconds)

    def stdout(self) -> str:
        return self.out.read_text()

    def stderr(self) -> str:
        return self.err.read_text()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Started]]:
    started = []

    def made(*command: object) -> Started:
        started.append(Started(tmp_path, *command))
        return started[-1]

    yield made
    for one in started:
        try:
            os.killpg(one.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def until(started: Started, condition: Callable[[], bool]) -> None:
    """Waits for something; the command must not end before."""
    end = time.monotonic() + WAIT
    while not condition():
        assert started.process.poll() is None, started.stderr()
        assert time.monotonic() < end, started.stderr()
        time.sleep(0.02)


def steps_of(run: Path) -> int:
    file = run / "metrics.jsonl"
    return sum('"loss"' in line for line in file.read_text().splitlines()) if file.exists() else 0


ENDLESS = {"training": {"steps": 100000}, "checkpoint": {"every": 50000}}


@MATRIX
def test_two_ranks_speak_with_one_voice(write, start, tmp_path) -> None:
    run = tmp_path / "run"
    started = start("quaver", "train", write(), "--nproc", 2, "--out", run)
    assert started.wait() == 0, started.stderr()
    assert started.stdout().count("finished 4 steps") == 1
    assert started.stderr().count("building the model") == 1
    assert "128 tokens/step" in started.stderr()
    assert steps_of(run) == 4
    assert json.loads((run / "environment.json").read_text())["ranks"] == 2
    assert json.loads((run / "ledger.json").read_text())["ok"] is True


def test_torchrun_does_the_same(write, start, tmp_path) -> None:
    run = tmp_path / "run"
    options = ("--nproc-per-node", 2, "--master-port", free_port())
    started = start("torch.distributed.run", *options, "-m", "quaver", "train", write(), "--out", run)
    assert started.wait() == 0, started.stderr()
    assert started.stdout().count("finished 4 steps") == 1
    assert started.stderr().count("building the model") == 1
    assert json.loads((run / "environment.json").read_text())["ranks"] == 2


@pytest.mark.parametrize(
    "how", [pytest.param("SIGTERM", marks=MATRIX), pytest.param("SIGINT", marks=MATRIX), "Ctrl-C"]
)
def test_a_signal_ends_after_the_step_with_a_checkpoint(write, start, tmp_path, how: str) -> None:
    """SIGTERM and SIGINT to the launcher alone; Ctrl-C in a terminal reaches launcher and ranks."""
    run = tmp_path / "run"
    started = start("quaver", "train", write(ENDLESS), "--nproc", 2, "--out", run)
    until(started, lambda: steps_of(run) >= 2)
    if how == "Ctrl-C":
        os.killpg(started.process.pid, signal.SIGINT)
    else:
        started.process.send_signal(getattr(signal, how))
    assert started.wait(30) == 0, started.stderr()
    steps = steps_of(run)
    assert f"stopped after {steps} steps" in started.stdout()
    assert started.stderr().count("stopping after this step") == 1
    assert (run / "checkpoints" / "latest").read_text().strip() == checkpoint_of(run, steps).name
    files = {file.name for file in checkpoint_of(run, steps).iterdir()}
    assert {"rank-00000.json", "rank-00001.json", "manifest.json"} <= files
    assert (run / "report.html").exists()


@MATRIX
@pytest.mark.parametrize("dead", [0, 1])
def test_a_killed_rank_ends_all_and_is_named(write, start, tmp_path, dead: int) -> None:
    run = tmp_path / "run"
    started = start("quaver", "train", write(ENDLESS), "--nproc", 2, "--out", run)
    until(started, lambda: steps_of(run) >= 2)
    pids = started.ranks()
    os.kill(pids[dead], signal.SIGKILL)
    assert started.wait(LIMIT) == 3, started.stderr()
    assert f"rank {dead} was ended by SIGKILL" in started.stderr()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids.values())


def test_a_rank_that_hangs_does_not_hold_up_the_end(write, start, tmp_path) -> None:
    """The other rank can answer no signal but SIGKILL."""
    run = tmp_path / "run"
    started = start("quaver", "train", write(ENDLESS), "--nproc", 2, "--out", run)
    until(started, lambda: steps_of(run) >= 2)
    pids = started.ranks()
    os.kill(pids[0], signal.SIGSTOP)
    os.kill(pids[1], signal.SIGKILL)
    assert started.wait(LIMIT) == 3, started.stderr()
    assert "rank 1 was ended by SIGKILL" in started.stderr()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids.values())


@MATRIX
def test_ranks_that_fail_tell_it_once(write, start, tmp_path) -> None:
    """A learning rate that makes every number non-finite: the run fails on each rank."""
    changes = {
        "training": {"steps": 50, "nonfinite_limit": 2},
        "optimizer": {"lr": 1e30, "clip_norm": None},
    }
    started = start("quaver", "train", write(changes), "--nproc", 2, "--out", tmp_path / "run")
    assert started.wait() == 3, started.stderr()
    assert started.stderr().count("2 steps in a row had a non-finite loss or gradient") == 1
    assert "remedy" in started.stderr()
    assert "Traceback" not in started.stderr()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"optimizer": {"lrr": 1.0}}, "lrr"),  # before torch is imported
        ({"fsdp_config": {"dp_shard_size": 3}}, "dp_shard_size 3 does not divide"),  # before ranks start
        ({"checkpoint": {"load_from": "nowhere"}}, "nowhere"),  # on the ranks
    ],
)
def test_a_wrong_config_is_told_once(write, start, tmp_path, changes: dict, told: str) -> None:
    started = start("quaver", "train", write(changes), "--nproc", 2, "--out", tmp_path / "run")
    assert started.wait() == 2, started.stderr()
    assert started.stderr().count("remedy:") == 1
    assert told in started.stderr()
    assert "Traceback" not in started.stderr()
