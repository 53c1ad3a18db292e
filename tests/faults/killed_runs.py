"""Runs that are killed: `python -m quaver train` in a process of its own, SIGKILL at a random moment, and what is left.

A moment is drawn in steps, not in seconds, so that a slow machine changes nothing: so many steps after the start,
and from there either anywhere, or after the first byte of the next save. What the kill has met is read off the folder
afterwards.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

PARTIAL = re.compile(r"step-(\d{8})\.tmp-[0-9a-f]{8}")
WHOLE = re.compile(r"step-(\d{8})")
WAIT = 180


@dataclass(frozen=True)
class Killed:
    """What a kill has left: the newest whole checkpoint (0: none), and where in a save it came."""

    aim: str
    asynchronous: bool
    steps: int  # lines of the metrics that were written
    newest: int
    phase: str  # the last that the run's own log names, and of which step
    in_save: bool  # between the first byte of a save and its rename

    def __str__(self) -> str:
        where = "in a save" if self.in_save else "outside"
        kind = "async" if self.asynchronous else "sync"
        return (
            f"aimed {self.aim:8} {kind:5} after {self.steps:3} steps, newest {self.newest:3}, "
            f"{where:9}, {self.phase}"
        )


class Run:
    """One run folder, trained by processes that come and go."""

    def __init__(self, config: Path, out: Path) -> None:
        self.config, self.out = config, out
        self.checkpoints = out / "checkpoints"
        self.log = out.with_name(out.name + ".log")

    def start(self, *, resume: bool, asynchronous: bool = False) -> subprocess.Popen:
        command = [sys.executable, "-m", "quaver", "train", str(self.config), "--out", str(self.out)]
        command += ["--resume"] * resume + [f"checkpoint.asynchronous={str(asynchronous).lower()}"]
        with self.log.open("w") as log:
            return subprocess.Popen(
                command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"}
            )

    def finish(self, *, resume: bool, asynchronous: bool = False) -> None:
        """Trains to the end."""
        process = self.start(resume=resume, asynchronous=asynchronous)
        try:
            assert process.wait(WAIT) == 0, self.log.read_text()
        finally:
            process.kill()

    def resumed_from(self) -> int:
        """The step that the last process says it went on from; 0 where it says that there was none."""
        text = self.log.read_text()
        found = re.search(r"resuming from step-(\d{8})", text)
        if found is None:
            assert "no complete checkpoint to resume from" in text or "resuming" not in text, text
        return int(found[1]) if found else 0

    def steps(self) -> int:
        file = self.out / "metrics.jsonl"
        return sum('"loss"' in line for line in file.read_text().splitlines()) if file.exists() else 0

    def newest(self) -> int:
        return max((int(m[1]) for name in self._names() if (m := WHOLE.fullmatch(name))), default=0)

    def begun(self) -> int:
        """The step of a save that has written its first byte and was not renamed; 0 where there is none."""
        newest, steps = self.newest(), [0]
        for name in self._names():
            match = PARTIAL.fullmatch(name)  # an older one is a checkpoint on its way out
            if match and int(match[1]) > newest and _any_byte(self.checkpoints / name):
                steps.append(int(match[1]))
        return max(steps)

    def kill(self, draw: random.Random, aim: str, *, resume: bool, asynchronous: bool) -> Killed:
        """Starts a process and kills it 1 to 5 steps further on: `anywhere`, or `save`: while one is written."""
        process = self.start(resume=resume, asynchronous=asynchronous)
        try:
            until(process, self.log, lambda: "GEMM sites" in self.log.read_text())
            goal = self.newest() + draw.randint(1, 5)
            until(process, self.log, lambda: self.steps() >= goal)
            if aim == "save":
                until(process, self.log, lambda: self.begun() > 0)
                time.sleep(draw.uniform(0, 0.08))
            else:
                time.sleep(draw.uniform(0, 0.4))
        finally:
            process.kill()
            process.wait()
        lines = (self.out / "checkpoints.log").read_text().splitlines()
        last = json.loads(lines[-1]) if lines else {"phase": "none", "step": 0}
        begun = self.begun()
        return Killed(
            aim=aim,
            asynchronous=asynchronous,
            steps=self.steps(),
            newest=self.newest(),
            phase=f"{last['phase']} of step {last['step']}",
            in_save=begun > 0,
        )

    def _names(self) -> list[str]:
        try:
            return os.listdir(self.checkpoints)
        except FileNotFoundError:
            return []


def _any_byte(folder: Path) -> bool:
    try:
        return any(entry.stat().st_size > 0 for entry in os.scandir(folder))
    except FileNotFoundError:
        return False  # renamed while we looked


def until(process: subprocess.Popen, log: Path, condition) -> None:
    """Waits for something that the process does before it ends."""
    end = time.monotonic() + WAIT
    while not condition():
        assert process.poll() is None, f"ended before the kill:\n{log.read_text()}"
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.001)
