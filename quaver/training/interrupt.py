"""Ctrl-C once: finish the step, then end with the run's folder complete. Ctrl-C twice: stop at once.

May import: nothing of Quaver.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Entered: the first signal only sets `requested`; a second SIGINT raises KeyboardInterrupt.

    Left: the handlers that were there before come back, or what they name as their `afterwards`: a handler for a
    program's start-up has no place after the run.
    """

    def __init__(self, notify: Callable[[str], None]) -> None:
        self.requested = False
        self._notify = notify
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, getattr(handler, "afterwards", handler))

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        if self.requested:
            return  # a launcher hands on what a terminal has sent already
        self.requested = True
        self._notify("stopping after this step (Ctrl-C again stops at once)")
