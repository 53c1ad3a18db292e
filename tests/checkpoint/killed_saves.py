"""Saves that are killed, each in a process of its own; run as a program: FOLDER ASYNCHRONOUS.

For each moment (a phase, or the n-th call that flushes, renames, deletes or writes a tensor) the folder gets a copy
of a run's checkpoints, named after the moment, in which a second save was ended by SIGKILL just before. Prints a
JSON list of the moments at which the process really died.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path

import torch
from small_runs import scatter_generators, small_run, train_steps

from quaver.checkpoint import CheckpointManager

CALLS = {
    "flush": (os, "fsync"),
    "rename": (os, "rename"),
    "unlink": (os, "unlink"),
    "tensor": (torch, "save"),
}
PHASES = ("writing", "manifest", "rename", "latest", "prune", "done")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def dying(function, at: int):
    """The function, which kills its process when it is called for the `at`-th time."""
    calls = [0]

    def call(*args, **kwargs):
        calls[0] += 1
        if calls[0] == at:
            die()
        return function(*args, **kwargs)

    return call


def save_and_die(folder: Path, state, moment: str, asynchronous: bool) -> None:
    kind, _, at = moment.partition("-")
    phases = []

    def on_phase(step: int, phase: str) -> None:
        phases.append(phase)
        if phase == moment:
            die()

    if at:
        owner, name = CALLS[kind]
        setattr(owner, name, dying(getattr(owner, name), int(at)))
    with CheckpointManager(folder, keep=1, asynchronous=asynchronous, on_phase=on_phase) as manager:
        manager.save(2, state)
    assert tuple(phases) == PHASES


def main(root: Path, asynchronous: bool) -> None:
    state = small_run()
    scatter_generators(5)
    train_steps(state, 1)
    with CheckpointManager(root / "first", keep=1) as manager:
        manager.save(1, state)
    train_steps(state, 1)
    moments = [*PHASES, *(f"flush-{n:02d}" for n in range(1, 20))]
    if not asynchronous:
        moments += [f"tensor-{n:02d}" for n in (1, 2, 10)]
        moments += [f"{kind}-{n:02d}" for kind in ("rename", "unlink") for n in range(1, 5)]
    killed = []
    for moment in moments:
        folder = shutil.copytree(root / "first", root / moment)
        child = os.fork()
        if child == 0:
            try:
                save_and_die(folder, state, moment, asynchronous)
            except BaseException:
                sys.excepthook(*sys.exc_info())
                os._exit(1)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            killed.append(moment)
        else:
            assert os.WEXITSTATUS(status) == 0, moment
    print(json.dumps(killed))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] == "True")
