"""Work beside the training: threads that give way to it, so that a save takes longer and the steps do not.

Writing and hashing a checkpoint take about a step's worth of processor time. Three things keep it from the steps: a
low priority, on Linux, where threads have one of their own; pauses, during which the steps run as if there were no
save; and short turns at Python's lock. May import: nothing.
"""

from __future__ import annotations

import os
import sys
import threading
import time

TAKES_TURNS = 5e-5  # seconds: how long the training waits while another thread runs Python; 5 ms otherwise
SHARE = 0.1  # of a processor that background work takes, in the mean
MOST_PAUSE = 20.0  # seconds of pauses in one save, however large
SHORTEST_PAUSE = 0.02  # seconds; shorter ones are saved up
STEPS_BACK = 15  # of niceness: about 3% of a processor that others want, all of one that nobody wants


def give_way() -> None:
    """Lowers the priority of the calling thread below the process's own; calling it again changes nothing."""
    if sys.platform == "linux":
        wanted = min(19, os.getpriority(os.PRIO_PROCESS, os.getpid()) + STEPS_BACK)
        thread = threading.get_native_id()
        if os.getpriority(os.PRIO_PROCESS, thread) < wanted:
            os.setpriority(os.PRIO_PROCESS, thread, wanted)


class Pace:
    """Pauses between pieces of work, called after each of them: `share` of a processor is taken, the rest is left.

    Args:
        share: of the time, in (0, 1].
        most: seconds of all pauses together.
    """

    def __init__(self, share: float = SHARE, most: float = MOST_PAUSE) -> None:
        self.paused = 0.0
        self._factor, self._most = 1 / share - 1, most
        self._owed, self._mark = 0.0, 0.0
        self._hurried = threading.Event()

    def begin(self) -> None:
        """The calling thread begins to work."""
        self._mark = time.thread_time()

    def __call__(self) -> None:
        """A piece of work is done."""
        now = time.thread_time()
        self._owed += (now - self._mark) * self._factor
        self._mark = now
        pause = min(self._owed, self._most - self.paused)
        if pause >= SHORTEST_PAUSE and not self._hurried.is_set():
            start = time.monotonic()
            self._hurried.wait(pause)
            self.paused += time.monotonic() - start
            self._owed = 0.0

    def hurry(self) -> None:
        """Somebody waits for the work: no more pauses, and the present one ends."""
        self._hurried.set()


class ShortTurns:
    """From `begin` to `end` Python's threads change places after 50 us, until the last of several has ended.

    A training step calls many short operations and takes Python's lock again after each; beside a thread that runs
    Python without a pause it would wait 5 ms each time, which makes it thirty times slower.
    """

    _lock = threading.Lock()
    _active = 0
    _before = 0.005

    def __init__(self) -> None:
        self._begun = False

    def begin(self) -> None:
        """The first remembers the interval that was set."""
        with self._lock:
            if self._begun:
                return
            self._begun = True
            if ShortTurns._active == 0:
                ShortTurns._before = sys.getswitchinterval()
                sys.setswitchinterval(min(ShortTurns._before, TAKES_TURNS))
            ShortTurns._active += 1

    def end(self) -> None:
        """The last sets it again; without a `begin` nothing."""
        with self._lock:
            if not self._begun:
                return
            self._begun = False
            ShortTurns._active -= 1
            if ShortTurns._active == 0:
                sys.setswitchinterval(ShortTurns._before)
