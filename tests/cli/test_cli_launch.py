"""The launcher from within: ranks and their parents, and whose failure is told. Whole runs: tests/ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from quaver.cli.launch import _Ranks, _told

RANK = """
    import os, subprocess, sys
    script = '''
    import os, sys, time
    from quaver.cli import launch
    sys.platform = "PLATFORM"
    os.environ[launch.LAUNCHED] = str(PARENT)
    launch.end_with_launcher()
    print(os.getpid(), flush=True)
    time.sleep(600)
    '''
    script = script.replace("\\n    ", "\\n").replace("PLATFORM", sys.argv[1])
    script = script.replace("PARENT", str(os.getpid()) if sys.argv[2] == "alive" else "1234567")
    sys.exit(-subprocess.run([sys.executable, "-c", script]).returncode)
"""
LOST = "RuntimeError: [gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer."
OWN = "RuntimeError: no such expert"
SAID = "ConfigError: the folder is taken"


def python(script: str, *arguments: object) -> subprocess.Popen:
    command = [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("platform", ["linux", "darwin"])
def test_a_rank_is_killed_with_its_parent(platform: str) -> None:
    """By the kernel, or by a thread of its own where the kernel does not do it."""
    parent = python(RANK, platform, "alive")
    rank = int(parent.stdout.readline())
    try:
        time.sleep(0.3)
        assert alive(rank)
        parent.kill()
        parent.wait()
        end = time.monotonic() + 10
        while alive(rank):
            assert time.monotonic() < end
            time.sleep(0.02)
    finally:
        if alive(rank):
            os.kill(rank, signal.SIGKILL)


@pytest.mark.parametrize("platform", ["linux", "darwin"])
def test_a_rank_whose_parent_died_before_it_looked_does_not_start(platform: str) -> None:
    parent = python(RANK, platform, "dead")
    out, _ = parent.communicate(timeout=20)
    assert (parent.returncode, out) == (signal.SIGKILL, "")


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


class Ended:
    """A process as the launcher looks at it; it ends when it is looked at for the `when`-th time."""

    def __init__(self, code: int, when: int = 0) -> None:
        self.proc, self._code, self._when = self, code, when

    def poll(self) -> int | None:
        self._when -= 1
        return self._code if self._when < 0 else None


@pytest.mark.parametrize(
    ("ranks", "first"),
    [
        # rank: exit code, what it has recorded, the second in which it did; in order of ranks
        ([(3, LOST, 1), (3, SAID, 1)], 1),  # within one second, the cause after what followed from it
        ([(3, LOST, 2), (3, OWN, 2)], 1),
        ([(3, OWN, 2), (3, SAID, 1)], 1),  # of two of their own, the earlier
        ([(3, LOST, 1), (-9, None, 0)], 1),  # a killed one records nothing
        ([(3, SAID, 1), (-9, None, 0)], 1),
        ([(3, LOST, 3), (3, LOST, 2), (3, LOST, 1)], 2),
        ([(0, None, 0), (3, LOST, 1)], 1),
    ],
)
def test_the_cause_is_told_and_not_what_followed(tmp_path: Path, ranks: list, first: int) -> None:
    files = {}
    for rank, (_, text, second) in enumerate(ranks):
        files[rank] = str(tmp_path / f"{rank}.json")
        if text is not None:
            stack = {"py_callstack": f"Traceback\n{text}", "timestamp": "1"}
            Path(files[rank]).write_text(json.dumps({"message": {"message": text, "extraInfo": stack}}))
            os.utime(files[rank], ns=(second, second))
    context = SimpleNamespace(
        subprocess_handlers={rank: Ended(code) for rank, (code, _, _) in enumerate(ranks)},
        pids=lambda: dict.fromkeys(range(len(ranks)), 1),
        error_files=files,
    )
    found = _Ranks(context, lambda pid: None)
    found.wait(SimpleNamespace(first=None, killed=False))
    assert found.first().local_rank == first
    text = ranks[first][1]
    if text == SAID:
        assert _told(found.first().message) == "error: the folder is taken"
    elif text is not None:
        assert _told(found.first().message) == f"Traceback\n{text}"


def test_a_rank_that_died_long_after_the_first_is_not_the_cause(tmp_path: Path) -> None:
    """It was aborted, say, while it left the group that another rank's error had broken."""
    file = tmp_path / "0.json"
    message = {"message": SAID, "extraInfo": {"py_callstack": "", "timestamp": "1"}}
    file.write_text(json.dumps({"message": message}))
    context = SimpleNamespace(
        subprocess_handlers={0: Ended(3), 1: Ended(-6, when=4)},
        pids=lambda: {0: 1, 1: 1},
        error_files={0: str(file), 1: str(tmp_path / "1.json")},
    )
    found = _Ranks(context, lambda pid: None)
    found.wait(SimpleNamespace(first=None, killed=False))
    assert found.codes == {0: 3, 1: -6}
    assert found.first().local_rank == 0
