"""A run's progress where stderr is no terminal: plain lines, few enough for a log.

May import: training (types only) and this room.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from quaver.cli.console import note, printable
from quaver.cli.figures import View, replaced_lines, start_line

if TYPE_CHECKING:
    from quaver.training import RunStart, StepResult, Validation

EVERY_STEPS = 10
EVERY_SECONDS = 30.0
STDERR = 2


class LineView(View):
    """One line a stage, one every ten steps (or half a minute), one or two a validation."""

    _stage = ""
    _shown = 0.0

    def on_stage(self, stage: str, done: int, total: int | None) -> None:
        """A line when a stage begins."""
        if stage != self._stage:
            self._stage = stage
            note(f"{self.name}: {stage}")

    def on_start(self, start: RunStart) -> None:
        """The start line, and what was replaced."""
        self.tally.total_steps = start.steps
        self._shown = time.monotonic()
        note(f"{self.name}: {start_line(start)}")
        for line in replaced_lines(start):
            note(f"{self.name}: {line}")

    def on_step(self, step: int, result: StepResult, tokens_per_s: float) -> None:
        """Every tenth step, the last one, each skipped one, and at least twice a minute."""
        self.tally.add(result, tokens_per_s)
        now = time.monotonic()
        due = step % EVERY_STEPS == 0 or step == self.tally.total_steps or result.skipped
        if due or now - self._shown >= EVERY_SECONDS:
            self._shown = now
            note(
                f"step {step}/{self.tally.total_steps}  loss {result.loss:.4f}  lr {result.lr:.2e}  "
                f"{tokens_per_s:,.0f} tokens/s  {self.tally.time_left()} left"
                + ("  skipped: not finite" if result.skipped else "")
            )

    def on_validation(self, step: int, validation: Validation, samples: list[dict[str, str]]) -> None:
        """Its figures, and each sample on one line."""
        note(self.tally.validation_line(step, validation))
        for sample in samples:
            note(f"  sample: {printable(sample['prompt'] + sample['text'], keep='')}")

    def on_message(self, message: str) -> None:
        """Written past Python's buffers: this runs in a signal handler, which may have cut into a write."""
        os.write(STDERR, f"{self.name}: {message}\n".encode())
