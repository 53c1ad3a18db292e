"""`--nproc N`: the same command on N processes of this machine, as torchrun would start them.

The processes are torch's own (elastic's multiprocessing). What is added is what a user of one command expects: rank 0
has the terminal; Ctrl-C lets every rank finish its step and ends with 0; a rank that dies ends all of them, and its
own error is what is shown. May import: console, errors, torch.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Any

from quaver.cli.console import err, note, printable
from quaver.errors import QuaverError

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

    # what it would log of a dead rank is told below, with the rank's own error
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
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
    ended = threading.Event()
    threading.Thread(target=_watch, args=(context, ended), daemon=True).start()
    try:
        while True:
            result = context.wait(timeout=POLL_SECONDS, period=POLL_SECONDS)
            if forward.killed:
                return 130
            if result is None:
                continue
            if not result.is_failed():
                return 0
            return _show_failure(dict(result.failures))
    finally:
        ended.set()


def _watch(context: Any, ended: threading.Event) -> None:
    """Kills what is left a while after a rank has died: torch asks it to end, and waits half a minute for it."""
    handlers = list(context.subprocess_handlers.values())
    while not ended.wait(POLL_SECONDS):
        if any(handler.proc.poll() not in (None, 0) for handler in handlers):
            if not ended.wait(GRACE_SECONDS):
                for handler in handlers:
                    handler.proc.kill()  # does nothing to one that has ended
            return


def _show_failure(failures: dict[int, Any]) -> int:
    """Tells what the first rank died of; one that was killed comes before those that lost it in a collective."""
    first = min(failures.values(), key=lambda f: (f.exitcode >= 0, f.timestamp))
    how = f"was ended by {signal.Signals(-first.exitcode).name}" if first.exitcode < 0 else "failed"
    err().print(f"rank {first.local_rank} {how}, and the run with it", markup=False)
    if first.exitcode >= 0:
        err().file.write(printable(_told(first.message)) + "\n")
    return 2 if first.exitcode == 2 else 3


def _told(message: Any) -> str:
    """What, where and remedy of an error that is meant for users; the traceback of any other."""
    if not isinstance(message, dict):
        return str(message)
    kind, _, text = str(message["message"]).partition(": ")
    if kind in {known.__name__ for known in QuaverError.__subclasses__()}:
        return f"error: {text}"
    return str(message["extraInfo"]["py_callstack"])


def record_error(error: BaseException) -> bool:
    """In a launched process: writes the error to where the launcher looks; False elsewhere."""
    if os.environ.get(LAUNCHED) != "1":
        return False
    from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

    ErrorHandler().record_exception(error)
    return True
