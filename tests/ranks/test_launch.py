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
from helpers.saved import checkpoint_of, differing, metric_lines, saved_tensors

from quaver.cli.early_stop import LINE as STOPPED_EARLY
from quaver.errors import ConfigError
from quaver.training.lock import run_lock

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
                # a job in the background, as a CI may be, hands on to its children that Ctrl-C is ignored
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )

    def ranks(self) -> dict[int, int]:
        """Rank -> pid of the launcher's processes, as far as it has started them."""
        pid, found = self.process.pid, {}
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            try:
                environment = Path(f"/proc/{child}/environ").read_text()
            except (FileNotFoundError, ProcessLookupError):
                continue  # some short command that importing torch asks
            words = dict(word.split("=", 1) for word in environment.split("\0") if "=" in word)
            if words.get("QUAVER_LAUNCHED") == str(pid):
                found[int(words["RANK"])] = int(child)
        return found

    def catches_sigterm(self, pid: int | None = None) -> bool:
        """Whether a process, the command's own by default, has a handler for SIGTERM by now."""
        status = Path(f"/proc/{pid or self.process.pid}/status").read_text()
        caught = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
        return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)

    def wait(self, seconds: float = WAIT) -> int:
        return self.process.wait(seconds)

    def stdout(self) -> str:
        return self.out.read_text()

    def stderr(self) -> str:
        return self.err.read_text()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Started]]:
    started = []

    def made(*command: object, folder: Path = tmp_path) -> Started:
        started.append(Started(folder, *command))
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


def gone(pid: int) -> bool:
    """Also of a process whose new parent has not asked for its exit code yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def lockable(run: Path) -> bool:
    """Whether a run could start there; a killed process lets go of a file with the last of its threads."""
    try:
        with run_lock(run):
            return True
    except ConfigError:
        return False


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
    assert started.stderr().count("starting 2 ranks\n") == 1
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
    assert "stopping" not in started.stderr()  # nobody has asked for it
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


@pytest.mark.parametrize("when", ["launcher", pytest.param("at once", marks=MATRIX), "ranks"])
@pytest.mark.parametrize("how", ["SIGTERM", pytest.param("SIGINT", marks=MATRIX)])
def test_a_signal_before_training_ends_at_once_and_leaves_nothing(
    write, start, tmp_path, how: str, when: str
) -> None:
    """To a launcher that has no ranks yet, to one that has just started them, and while they import torch."""
    run = tmp_path / "run"
    started = start("quaver", "train", write(ENDLESS), "--nproc", 2, "--out", run)
    if when == "launcher":
        until(started, started.catches_sigterm)
    else:
        until(started, lambda: len(started.ranks()) == 2)
    if when == "ranks":
        until(started, lambda: all(started.catches_sigterm(pid) for pid in started.ranks().values()))
    pids = started.ranks()
    started.process.send_signal(getattr(signal, how))
    told = started.stderr() + {"SIGTERM": f"{STOPPED_EARLY}\n", "SIGINT": "stopped\n"}[how]
    assert started.wait(LIMIT) == {"SIGTERM": 0, "SIGINT": 130}[how], started.stderr()
    assert started.stderr() in (told, "starting 2 ranks\n" + told)
    assert started.stdout() == ""
    assert all(gone(pid) for pid in pids.values())
    assert not run.exists()


@pytest.mark.parametrize(
    ("how", "code", "told"), [("SIGTERM", 0, f"{STOPPED_EARLY}\n"), ("SIGINT", 130, "stopped\n")]
)
def test_one_process_ends_alike_before_training(write, start, tmp_path, how: str, code: int, told: str) -> None:
    run = tmp_path / "run"
    started = start("quaver", "train", write(ENDLESS), "--out", run)
    until(started, started.catches_sigterm)
    started.process.send_signal(getattr(signal, how))
    assert started.wait(WAIT) == code, started.stderr()
    assert started.stderr() == told
    assert not run.exists()


@MATRIX
def test_a_second_ctrl_c_kills_the_ranks_and_names_the_folder(write, start, tmp_path) -> None:
    """One step of 3000 micro-steps would go on for long."""
    run = tmp_path / "run"
    config = write({"training": {"steps": 10}})
    command = ("train", config, "--nproc", 2, "--out", run, "gradient_accumulation_steps=3000")
    started = start("quaver", *command)
    until(started, lambda: "parameters" in started.stderr())
    time.sleep(0.5)
    pids = started.ranks()
    started.process.send_signal(signal.SIGINT)
    until(started, lambda: "stopping after this step" in started.stderr())
    started.process.send_signal(signal.SIGINT)
    assert started.wait(LIMIT) == 130, started.stderr()
    assert f"\nstopped: {run} is incomplete\n" in started.stderr()
    assert all(gone(pid) for pid in pids.values())


def test_ranks_end_with_their_launcher_and_the_folder_has_one_writer(write, start, tmp_path) -> None:
    """SIGKILL is what an out-of-memory killer sends, and nothing can be handed on then."""
    run = tmp_path / "run"
    config = write(ENDLESS)
    started = start("quaver", "train", config, "--nproc", 2, "--out", run)
    until(started, lambda: steps_of(run) >= 2)
    pids = started.ranks()
    steps = steps_of(run)
    (tmp_path / "second").mkdir()
    second = start("quaver", "train", config, "--resume", "--out", run, folder=tmp_path / "second")
    assert second.wait() == 2, second.stderr()
    assert f"process {pids[0]} on " in second.stderr()
    assert f"where: {run}/.lock" in second.stderr()
    until(started, lambda: steps_of(run) > steps)  # the first goes on
    started.process.kill()
    end = time.monotonic() + LIMIT
    while not (all(gone(pid) for pid in pids.values()) and lockable(run)):
        assert time.monotonic() < end, started.stderr()
        time.sleep(0.05)


@MATRIX
def test_a_rank_killed_in_an_asynchronous_save_loses_no_bit(write, start, tmp_path) -> None:
    """Rank 1 dies in a save; the resumed run ends as the one that was never killed."""
    run, unbroken = tmp_path / "run", tmp_path / "unbroken"
    config = write(
        {
            "training": {"steps": 12, "validate_every": 4},
            "checkpoint": {"every": 1, "asynchronous": True},
        }
    )
    started = start("quaver", "train", config, "--nproc", 2, "--out", unbroken)
    assert started.wait() == 0, started.stderr()
    for attempt in range(4):
        options = ["--resume"] * (attempt > 0)
        started = start("quaver", "train", config, "--nproc", 2, "--out", run, *options)
        before, saving = newest(run), 0

        def in_a_later_save() -> bool:
            nonlocal saving
            saving = begun(run)
            return newest(run) > before and saving > newest(run)  # noqa: B023

        until(started, in_a_later_save)
        os.kill(started.ranks()[1], signal.SIGKILL)
        assert started.wait(LIMIT) == 3, started.stderr()
        assert "rank 1 was ended by SIGKILL" in started.stderr()
        if newest(run) < saving:
            break
    assert 0 < newest(run) < saving, "no kill has met a save"
    kept = newest(run)
    started = start("quaver", "train", config, "--nproc", 2, "--out", run, "--resume")
    assert started.wait() == 0, started.stderr()
    assert f"resuming from step-{kept:08d}" in started.stderr()
    assert metric_lines(run) == metric_lines(unbroken)
    ends = [saved_tensors(checkpoint_of(folder, 12)) for folder in (run, unbroken)]
    assert len(ends[0]) > 10
    assert differing(*ends) == []
    assert not list((run / "checkpoints").glob("*.tmp-*"))


def newest(run: Path) -> int:
    """Step of the newest whole checkpoint, 0 without any."""
    return max((int(path.name[5:]) for path in run.glob("checkpoints/step-????????")), default=0)


def begun(run: Path) -> int:
    """Step of the newest save that has written a byte and was not renamed, 0 without any."""
    steps = [0]
    for file in run.glob("checkpoints/step-*.tmp-*/*"):
        try:
            steps += [int(file.parent.name[5:13])] * (file.stat().st_size > 0)
        except FileNotFoundError:
            continue  # renamed while we looked
    return max(steps)
