"""SIGTERM before training, seen from within: in a long call into C, after a run, and in a rank."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from quaver.cli.early_stop import LINE, STOPPED_EARLY, EarlyStop

IN_C = """
    import fcntl, sys
    from quaver.cli.early_stop import EarlyStop
    with EarlyStop(launched=sys.argv[2] == "True", speaks=sys.argv[3] == "True"):
        print("ready", flush=True)
        fcntl.flock(open(sys.argv[1]), fcntl.LOCK_EX)  # goes on waiting after a signal
"""
def python(script: str, *arguments: object) -> subprocess.Popen:
    command = [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("launched", "speaks", "code", "told"),
    [
        (False, True, 0, LINE + "\n"),
        (False, False, 0, ""),  # a rank of somebody else's launcher
        (True, True, STOPPED_EARLY, ""),  # its launcher tells it
    ],
)
def test_a_call_into_c_does_not_hold_it_up(
    tmp_path: Path, launched: bool, speaks: bool, code: int, told: str
) -> None:
    with (tmp_path / "busy").open("w") as busy:
        fcntl.flock(busy, fcntl.LOCK_EX)
        process = python(IN_C, busy.name, launched, speaks)
        try:
            assert process.stdout.readline() == "ready\n"
            process.send_signal(signal.SIGTERM)
            _, err = process.communicate(timeout=20)
        finally:
            process.kill()
    assert (process.returncode, err) == (code, told)


@pytest.mark.parametrize(("launched", "afterwards"), [(False, signal.SIG_DFL), (True, signal.SIG_IGN)])
def test_a_run_takes_over_and_start_up_does_not_come_back(launched: bool, afterwards: object) -> None:
    """This process would be gone if the signals within the run, or after it, still were those of its start."""
    from quaver.training.interrupt import StopRequest

    before, told = signal.getsignal(signal.SIGTERM), []
    with EarlyStop(launched=launched, speaks=True) as early:
        assert signal.getsignal(signal.SIGTERM) is early
        with StopRequest(told.append) as stop:
            signal.raise_signal(signal.SIGTERM)
            time.sleep(0.2)
            assert stop.requested
        assert len(told) == 1
        assert signal.getsignal(signal.SIGTERM) == afterwards
        if launched:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.2)
    assert signal.getsignal(signal.SIGTERM) == before
    assert signal.set_wakeup_fd(-1) == -1
