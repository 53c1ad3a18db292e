"""`--nproc N`: the same command on N processes of this machine, as torchrun would start them.

The processes are torch's own (elastic's multiprocessing). What is added is what a user of one command expects: rank 0
has the terminal; Ctrl-C lets every rank finish its step and ends with 0; a rank that dies ends all of them, and its
own error is what is shown; ranks do not outlive their launcher. Nothing but a signal to the launcher is handed on as
one: a rank is never told to stop because another has died. May import: console, early_stop, errors, torch.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from quaver.cli.console import err, note, printable
from quaver.cli.early_stop import LINE, STOPPED_EARLY
from quaver.errors import QuaverError

# Set in the processes, to the launcher's pid: they end with it, and record their errors to be shown here, the first
# one first.
LAUNCHED = "QUAVER_LAUNCHED"
POLL_SECONDS = 0.1
GRACE_SECONDS = 5  # for the other ranks, once one is dead; they wait for it in a collective
_BY_SIGTERM = (-signal.SIGTERM, STOPPED_EARLY)  # how a rank ends that gets it before its run has a folder
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_LOST_PEER = re.compile(r"gloo/transport|by peer|Broken pipe")  # in a collective, since another rank has ended


def launch(arguments: Sequence[str], ranks: int, folder_of: Callable[[int], Path | None]) -> int:
    """Runs `quaver ARGUMENTS` on `ranks` processes; returns the exit code.

    0 where all ended well, or SIGTERM came before training; 2 where the first failure was a wrong config or plan; 3
    for any other; 130 after a second Ctrl-C, or one before training.

    Args:
        arguments: the command line of each rank.
        ranks: how many.
        folder_of: pid of rank 0 -> the run's folder, None before it has one.
    """
    note(f"starting {ranks} ranks")
    logs = tempfile.mkdtemp(prefix="quaver-ranks-")
    with _Forward() as forward:
        context = _start(arguments, ranks, logs)
        try:
            forward.to(list(context.pids().values()))
            ended = _Ranks(context, folder_of)
            ended.wait(forward)
        finally:
            context.close(signal.SIGKILL, 1)
    err().show_cursor()  # a rank that was killed has left its bar's terminal without
    code = _tell(ended, forward)
    if code == 0 or (code == 130 and ended.folder is None):
        shutil.rmtree(logs, ignore_errors=True)
    else:
        note(f"logs of the other ranks: {logs}")
    return code


def _start(arguments: Sequence[str], ranks: int, logs: str) -> Any:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std, start_processes
    from torch.distributed.elastic.utils.distributed import get_free_port

    # what it would log of a dead rank is told below, with the rank's own error
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ""  # none: its handlers would stand in for ours
    port = str(get_free_port())
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, (os.cpu_count() or 1) // ranks))
    return start_processes(
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
                LAUNCHED: str(os.getpid()),
            }
            for rank in range(ranks)
        },
        logs_specs=DefaultLogsSpecs(
            log_dir=logs, redirects={rank: Std.NONE if rank == 0 else Std.ALL for rank in range(ranks)}
        ),
    )


class _Forward:
    """Hands the first SIGINT or SIGTERM to every rank, once; a second SIGINT kills them."""

    def __init__(self) -> None:
        self.first: int | None = None  # the signal that stops the run
        self.killed = False
        self._pids: list[int] = []
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Forward:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, getattr(handler, "afterwards", handler))

    def to(self, pids: list[int]) -> None:
        """The ranks are there; what has come while they were started is handed on now."""
        self._pids = pids
        if self.first is not None:
            self._send(signal.SIGKILL if self.killed else signal.SIGTERM)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.first is None:
            self.first = number
            self._send(signal.SIGTERM)
        elif number == signal.SIGINT:
            self.killed = True
            self._send(signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        for pid in self._pids:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue  # that rank has ended already


class _Ranks:
    """The launched processes: who has ended how, who was first to fail, and where the run's folder is.

    torch's own waiting would send SIGTERM to the others as soon as one is dead, and they could not tell it from a
    user's. Here they find out by themselves, in a collective, write what they have to, and are killed after a while.
    """

    def __init__(self, context: Any, folder_of: Callable[[int], Path | None]) -> None:
        self.context, self._folder_of = context, folder_of
        self.codes: dict[int, int] = {}  # rank -> exit code
        self.first_failed: list[int] = []  # ranks, in the order in which they were seen
        self.folder: Path | None = None

    def wait(self, forward: _Forward) -> None:
        """Until every rank has ended, or the failure of one, or a second Ctrl-C, has ended them."""
        deadline: float | None = None
        while not self._look() and not forward.killed:
            if forward.first is not None:
                self.look_for_folder()
            if self.first_failed and deadline is None:
                self._look()  # of two that died as one, the later may have been looked at first
                self.first_failed = self._failed()
                deadline = time.monotonic() + GRACE_SECONDS
            if deadline is not None and time.monotonic() > deadline:
                return
            time.sleep(POLL_SECONDS)

    def look_for_folder(self) -> None:
        """Asks for the run's folder, until it is known."""
        self.folder = self.folder or self._folder_of(self.context.pids()[0])

    def _look(self) -> bool:
        """Whether all have ended by now."""
        handlers = self.context.subprocess_handlers
        for rank, handler in handlers.items():
            code = handler.proc.poll()
            if code is not None:
                self.codes.setdefault(rank, code)
        if not self.first_failed:
            self.first_failed = self._failed()
        return len(self.codes) == len(handlers)

    def _failed(self) -> list[int]:
        return [rank for rank, code in self.codes.items() if code]

    def first(self) -> Any:
        """The failure to be told: of a rank that was killed, else a rank's own error, the earliest."""
        from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

        pids, files = self.context.pids(), self.context.error_files
        failures = [ProcessFailure(rank, pids[rank], self.codes[rank], files[rank]) for rank in self._failed()]
        return min(failures, key=self._order)

    def _order(self, failure: Any) -> tuple[int, int]:
        """What failed first, and not because of another rank; torch's own times are whole seconds."""
        if failure.exitcode < 0 and failure.local_rank in self.first_failed:
            return 0, 0
        file = Path(self.context.error_files[failure.local_rank])
        if not file.exists():
            return 2, 0
        return (2 if _LOST_PEER.search(_told(failure.message)) else 1), file.stat().st_mtime_ns


def _tell(ranks: _Ranks, forward: _Forward) -> int:
    """One line, or the first error, on how the run has ended; returns the exit code."""
    if forward.killed and not (len(ranks.codes) == len(ranks.context.pids()) and not ranks.first_failed):
        ranks.look_for_folder()
        note(f"stopped: {ranks.folder} is incomplete" if ranks.folder is not None else "stopped")
        return 130
    if not ranks.first_failed:
        return 0
    first = ranks.first()
    if forward.first is not None and first.exitcode in _BY_SIGTERM:
        # rank 0 is the one that writes, and it had not begun if the signal has ended it too
        untouched = ranks.folder is None or ranks.codes.get(0) in _BY_SIGTERM
        if forward.first == signal.SIGINT:
            note("stopped" if untouched else f"stopped: {ranks.folder} is incomplete")
            return 130
        note(LINE if untouched else f"stopped before training: {ranks.folder} is incomplete")
        return 0
    return _show_failure(first)


def _show_failure(first: Any) -> int:
    """Tells what the first rank died of."""
    number = signal.SIGTERM if first.exitcode == STOPPED_EARLY else -first.exitcode
    how = f"was ended by {signal.Signals(number).name}" if number > 0 else "failed"
    err().print(f"rank {first.local_rank} {how}, and the run with it", markup=False)
    if number <= 0:
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
    if LAUNCHED not in os.environ:
        return False
    from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

    ErrorHandler().record_exception(error)
    return True


def end_with_launcher() -> None:
    """In a launched process: from here on it is killed as soon as its launcher has ended, however that was.

    A checkpoint that is being written then is as after any kill: the next start does not take it for whole.
    """
    launcher = int(os.environ[LAUNCHED])
    if not _kernel_kills_with_parent():
        threading.Thread(target=_watch_parent, args=(launcher,), name="launcher", daemon=True).start()
    if os.getppid() != launcher:  # it has ended before the line above
        os.kill(os.getpid(), signal.SIGKILL)


def _kernel_kills_with_parent() -> bool:
    """Linux alone can be asked to."""
    if sys.platform != "linux":
        return False
    return ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) == 0


def _watch_parent(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(POLL_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)
