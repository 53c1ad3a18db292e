"""Work beside the training: a thread that gives way to it, so that a save takes longer and the steps do not.

Writing and hashing a checkpoint take about a step's worth of processor time. A training step leaves some of it
unused, where it runs on one thread; a thread of low priority lives on that. Only Linux has priorities of threads;
elsewhere the thread keeps the one it has, and saves cost the steps more. May import: nothing.
"""

from __future__ import annotations

import os
import sys
import threading

STEPS_BACK = 15  # of niceness: about 3% of a processor that others want, all of one that nobody wants


def give_way() -> None:
    """Lowers the priority of the calling thread below the process's own; calling it again changes nothing."""
    if sys.platform == "linux":
        wanted = min(19, os.getpriority(os.PRIO_PROCESS, os.getpid()) + STEPS_BACK)
        thread = threading.get_native_id()
        if os.getpriority(os.PRIO_PROCESS, thread) < wanted:
            os.setpriority(os.PRIO_PROCESS, thread, wanted)
