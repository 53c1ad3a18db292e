"""What a run tells while it goes on; the command line shows it, a notebook may ignore it.

May import: step, evaluate, metrics.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from quaver.training.evaluate import Validation
from quaver.training.metrics import encode_number
from quaver.training.step import StepResult

REPORT = "report.html"


@dataclass(frozen=True)
class RunStart:
    """What is known when the first step begins."""

    folder: Path
    parameters: int
    low_precision_sites: int
    recipe: str | None
    device: str
    threads: int
    steps: int
    tokens_per_step: int
    replacements: list[dict[str, Any]] = field(default_factory=list)  # [{"pattern", "hits": [FQN]}]


class Observer(Protocol):
    """Listens to a run; called on the training thread, so it should return at once."""

    def on_stage(self, stage: str, done: int, total: int | None) -> None:
        """What goes on beside the steps: reading, tokenising, building, validating."""

    def on_start(self, start: RunStart) -> None:
        """The first step is about to begin."""

    def on_step(self, step: int, result: StepResult, tokens_per_s: float) -> None:
        """A step is done."""

    def on_validation(self, step: int, validation: Validation, samples: list[dict[str, str]]) -> None:
        """A validation is done."""

    def on_message(self, message: str) -> None:
        """Something worth a line; comes from inside a signal handler, so nothing here may wait for a lock."""


class Silent:
    """An observer that shows nothing."""

    def on_stage(self, stage: str, done: int, total: int | None) -> None:
        """Nothing."""

    def on_start(self, start: RunStart) -> None:
        """Nothing."""

    def on_step(self, step: int, result: StepResult, tokens_per_s: float) -> None:
        """Nothing."""

    def on_validation(self, step: int, validation: Validation, samples: list[dict[str, str]]) -> None:
        """Nothing."""

    def on_message(self, message: str) -> None:
        """Nothing."""


@dataclass(frozen=True)
class RunResult:
    """What a finished run was.

    Args:
        dir: its folder.
        steps: steps taken, skipped ones included.
        val_loss: last validation loss in nats per token.
        interrupted: True if it was asked to stop before its last step.
    """

    dir: Path
    steps: int
    val_loss: float
    interrupted: bool = False

    @property
    def report(self) -> Path:
        """The page on this run."""
        return self.dir / REPORT

    def to_json(self) -> dict[str, Any]:
        """As one JSON document; a loss that is not finite is the string "nan", "inf" or "-inf"."""
        return {
            "dir": str(self.dir),
            "steps": self.steps,
            "val_loss": encode_number(self.val_loss),
            "interrupted": self.interrupted,
            "report": str(self.report),
        }
