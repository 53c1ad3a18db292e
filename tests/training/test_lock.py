"""One writer to a run's folder: processes of their own hold the lock, die with it, and race for it."""

from __future__ import annotations

import multiprocessing
import os
import re
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from quaver.errors import ConfigError
from quaver.training.lock import LOCK, folder_locked_by, run_lock

FORK = multiprocessing.get_context("fork")  # torch is imported once


def _hold(folder: Path, held: Event, let_go: Event) -> None:
    with run_lock(folder):
        held.set()
        let_go.wait()


def _count(folder: Path, rounds: int) -> None:
    """Adds 1 to a number in the folder, again and again, reading and writing it under the lock."""
    while rounds:
        try:
            with run_lock(folder):
                number = int((folder / "number").read_text())
                time.sleep(0.0005)
                (folder / "number").write_text(str(number + 1))
                rounds -= 1
        except ConfigError:
            pass
        time.sleep(0.0005)


class Holder:
    """A process that has the lock of a folder until it is let go."""

    def __init__(self, folder: Path) -> None:
        held, self._let_go = FORK.Event(), FORK.Event()
        self._process = FORK.Process(target=_hold, args=(folder, held, self._let_go))
        self._process.start()
        assert held.wait(30)
        self.pid = self._process.pid

    def end(self) -> None:
        self._let_go.set()
        self._process.join()
        assert self._process.exitcode == 0

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


@pytest.fixture
def hold() -> Iterator[Callable[[Path], Holder]]:
    started = []

    def made(folder: Path) -> Holder:
        started.append(Holder(folder))
        return started[-1]

    yield made
    for holder in started:
        holder.kill()


def test_a_second_run_is_refused_by_pid_path_and_remedy(hold, tmp_path) -> None:
    other = hold(tmp_path)
    with pytest.raises(ConfigError) as refused, run_lock(tmp_path):
        pass
    assert refused.value.exit_code == 2
    assert f"process {other.pid} on {socket.gethostname()}" in refused.value.what
    assert refused.value.where == str(tmp_path / ".lock")
    assert f"kill {other.pid}" in refused.value.remedy
    other.end()  # it ends, and its lock with it
    with run_lock(tmp_path):
        assert (tmp_path / LOCK).read_text() == f"{os.getpid()} on {socket.gethostname()}\n"
    assert list(tmp_path.iterdir()) == []


def test_two_runs_of_one_process_are_two(tmp_path) -> None:
    with run_lock(tmp_path):
        with pytest.raises(ConfigError, match=f"process {os.getpid()} "), run_lock(tmp_path):
            pass
        with pytest.raises(ConfigError), run_lock(tmp_path):  # the refusal has not let go of the first
            pass


def test_the_lock_of_a_killed_run_locks_nothing(hold, tmp_path) -> None:
    other = hold(tmp_path)
    other.kill()
    assert (tmp_path / LOCK).read_text().startswith(f"{other.pid} on ")
    with run_lock(tmp_path):
        assert (tmp_path / LOCK).read_text() == f"{os.getpid()} on {socket.gethostname()}\n"


def test_an_error_within_lets_go(tmp_path) -> None:
    with pytest.raises(ValueError, match="within"), run_lock(tmp_path):
        raise ValueError("within")
    with run_lock(tmp_path):
        pass


def test_a_command_that_a_run_has_started_does_not_hold_it(tmp_path) -> None:
    with run_lock(tmp_path):
        child = subprocess.Popen(["sleep", "60"], close_fds=False)
    try:
        with run_lock(tmp_path):
            pass
    finally:
        child.kill()
        child.wait()


def test_processes_that_race_for_it_hold_it_one_at_a_time(tmp_path) -> None:
    """A file that is removed by its last holder must not be locked by the next beside a new one."""
    (tmp_path / "number").write_text("0")
    racing = [FORK.Process(target=_count, args=(tmp_path, 150)) for _ in range(3)]
    for process in racing:
        process.start()
    for process in racing:
        process.join(120)
    assert [process.exitcode for process in racing] == [0, 0, 0]
    assert (tmp_path / "number").read_text() == "450"


def test_a_link_is_not_followed(tmp_path) -> None:
    outside, run = tmp_path / "outside", tmp_path / "run"
    outside.write_text("precious")
    run.mkdir()
    (run / LOCK).symlink_to(outside)
    with pytest.raises(ConfigError, match=r"cannot be locked") as refused, run_lock(run):
        pass
    assert refused.value.where == str(run / LOCK)
    assert outside.read_text() == "precious"
    assert folder_locked_by(os.getpid(), "run", run) is None


@pytest.mark.parametrize("text", ["", "42", "no pid\n", "7 on a\n8 on b\n", "9" * 5000, "\x00\xff\n"])
def test_a_holder_that_says_nothing_of_use_is_another_process(hold, tmp_path, text: str) -> None:
    hold(tmp_path)
    (tmp_path / LOCK).write_text(text)
    with pytest.raises(ConfigError, match="another process is writing") as refused, run_lock(tmp_path):
        pass
    assert re.search(r"\d", refused.value.remedy) is None


def test_the_folder_of_a_process_is_found_by_its_lock(hold, tmp_path) -> None:
    runs = tmp_path / "runs"
    for name in ("a", "a-2", "a-10", "b", "a[x]"):
        (runs / name).mkdir(parents=True)
    other = hold(runs / "a-10")
    assert folder_locked_by(other.pid, "a", runs=runs) == runs / "a-10"
    assert folder_locked_by(other.pid, "b", runs=runs) is None
    assert folder_locked_by(other.pid + 1, "a", runs=runs) is None
    assert folder_locked_by(other.pid, "a", runs / "a-10") == runs / "a-10"
    assert folder_locked_by(other.pid, "a", runs / "a") is None
    special = hold(runs / "a[x]")
    assert folder_locked_by(special.pid, "a[x]", runs=runs) == runs / "a[x]"
    other.kill()  # also of one that was killed
    assert folder_locked_by(other.pid, "a", runs=runs) == runs / "a-10"
