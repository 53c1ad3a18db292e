"""`--nproc N`: the same command on N processes of this machine, as torchrun would start them.

The processes are torch's own (elastic's multiprocessing). What is added is what a user of one command expects: rank 0
has the terminal; Ctrl-C lets every rank finish its step and ends with 0; a rank that dies ends all of them, and its
own error is what is shown. May import: console, errors, torch.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any

from quaver.cli.console import err, note, printable

LAUNCHED = (
    "QUAVER_LAUNCHED"  # set in the processes: errors are recorded there and shown here, the first one first
)
POLL_SECONDS = 0.1
GRACE_SECONDS = 5  # for the other ranks, once one is dead; they wait for it in a collective


def launch(arguments: Sequence[str], ranks: int) -> int:
    """Runs `quaver ARGUMENTS` on `ranks` processes; returns the exit code.

    0 where all ended well; 2 where the first failure was a wrong config or plan; 3 for any other; 130 after a second
    Ctrl-C.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std, start_processes
    from torch.distributed.elastic.utils.distributed import get_free_port

    port = str(get_free_port())
    logs = tempfile.mkdtemp(prefix="quaver-ranks-")
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, (os.cpu_count() or 1) // ranks))
    context = start_processes(
        name="quaver",
        entrypoint=sys.executable,
        args=dict.fromkeys(range(ranks), ("-m", "quaver", *arguments)),
        envs={
            rank: {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "OMP_NUM_THREADS": threads,
                LAUNCHED: "1",
            }
            for rank in range(ranks)
        },
        logs_specs=DefaultLogsSpecs(
            log_dir=logs, redirects={rank: Std.NONE if rank == 0 else Std.ALL for rank in range(ranks)}
        ),
    )
    forward = _Forward(context)
    try:
        with forward:
            code = _wait(context, forward)
    finally:
        context.close(signal.SIGKILL, 1)
    if code == 0:
        shutil.rmtree(logs, ignore_errors=True)
    else:
        note(f"logs of the other ranks: {logs}")
    return code


class _Forward:
    """Hands the first SIGINT or SIGTERM to every rank, once; a second SIGINT kills them."""

    def __init__(self, context: Any) -> None:
        self.context, self.stopping, self.killed = context, False, False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Forward:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        kill = self.stopping and number == signal.SIGINT
        self.killed = self.killed or kill
        self.stopping = True
        for pid in self.context.pids().values():
            try:
                os.kill(pid, signal.SIGKILL if kill else signal.SIGTERM)
            except ProcessLookupError:
                continue  # that rank has ended already


def _wait(context: Any, forward: _Forward) -> int:
    while True:
        result = context.wait(timeout=POLL_SECONDS, period=POLL_SECONDS)
        if forward.killed:
            note("stopped: the run's folder is incomplete")
            return 130
        if result is None:
            continue
        if not result.is_failed():
            return 0
        return _show_failures(context, dict(result.failures))


def _show_failures(context: Any, failures: dict[int, Any]) -> int:
    """Ends the other ranks and tells what the first one died of."""
    first = min(failures.values(), key=lambda f: (f.exitcode >= 0, f.timestamp))
    end = time.monotonic() + GRACE_SECONDS
    for pid in context.pids().values():
        _signal(pid, signal.SIGTERM)
    while time.monotonic() < end and any(_alive(pid) for pid in context.pids().values()):
        time.sleep(POLL_SECONDS)
    how = f"was ended by {signal.Signals(-first.exitcode).name}" if first.exitcode < 0 else "failed"
    err().print(f"rank {first.local_rank} {how}, and the run with it", markup=False)
    if first.exitcode >= 0:
        err().file.write(printable(str(first.message)) + "\n")
    return 2 if first.exitcode == 2 else 3


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return  # ended already


def _alive(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG) == (0, 0)
    except ChildProcessError:
        return False


def record_error(error: BaseException) -> bool:
    """In a launched process: writes the error to where the launcher looks; False elsewhere."""
    if os.environ.get(LAUNCHED) != "1":
        return False
    from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

    ErrorHandler().record_exception(error)
    return True
