"""SIGTERM while a run starts up: nothing is there to be kept, so the process ends at once, and says so.

Importing torch, training a tokeniser and waiting for other ranks are long calls into C, in which Python runs no signal
handler; a thread is woken by the signal itself. From the run's folder on, `quaver.training.interrupt` takes over.
May import: nothing of Quaver, and no torch.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

STOPPED_EARLY = 128 + signal.SIGTERM  # a rank ends with it: its launcher says the line, and ends with 0
LINE = "stopped before training: nothing was written"
_STDERR = 2
_CLEAN_LINE = "\r\x1b[K\x1b[?25h"  # on a terminal: without what is left of a bar, with the cursor that it hid


class EarlyStop:
    """Entered around a run's start-up and the run itself: SIGTERM ends the process, until another handler is set.

    It is the handler itself, so that what replaces it for a while can read `afterwards`.

    Args:
        launched: this process is a rank of a launcher of ours, and leaves the telling to it.
        speaks: this process is the one that tells, rank 0 or the only one.
    """

    def __init__(self, *, launched: bool, speaks: bool) -> None:
        self._launched, self._speaks = launched, speaks and not launched
        # Once the run has ended, it is no start-up any more. A rank has nothing to be stopped in then; its launcher
        # waits for it, and has SIGKILL.
        self.afterwards = signal.SIG_IGN if launched else signal.SIG_DFL
        self._before: Any = None
        self._wakeup_before = -1
        self._read = self._write = -1

    def __enter__(self) -> EarlyStop:
        if threading.current_thread() is not threading.main_thread():
            return self  # a library's caller: signals are not ours
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._wakeup_before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._before = signal.signal(signal.SIGTERM, self)
        threading.Thread(target=self._watch, args=(self._read,), name="early-stop", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._write < 0:
            return
        signal.signal(signal.SIGTERM, self._before)
        signal.set_wakeup_fd(self._wakeup_before)
        os.close(self._write)  # the thread reads the end, and ends
        self._write = -1

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """The handler for Python's sake: what is to be done, the thread does."""

    def _watch(self, pipe: int) -> None:
        while numbers := os.read(pipe, 64):
            in_charge = signal.getsignal(signal.SIGTERM) is self
            if signal.SIGTERM in numbers and in_charge:
                self._end()
        os.close(pipe)

    def _end(self) -> None:
        """Ends the process past every lock and buffer: the main thread may be anywhere."""
        text = _CLEAN_LINE if os.isatty(_STDERR) and os.environ.get("RANK", "0") == "0" else ""
        if self._speaks:
            text += LINE + "\n"
        try:
            os.write(_STDERR, text.encode())
        finally:
            os._exit(STOPPED_EARLY if self._launched else 0)
