"""Numbers as a run shows them, on a terminal and in a log alike. May import: training (types only)."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quaver.training import RunStart, StepResult, Validation


def count(number: float) -> str:
    """6_700_000 -> "6.7 M": two to four digits and a unit."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= 0.9995 * size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.0f}"


def files(number: int) -> str:
    """1 -> "1 file", 1234 -> "1,234 files"."""
    return f"{number:,} {'file' if number == 1 else 'files'}"


def clock(seconds: float) -> str:
    """75 -> "1:15", 3700 -> "1:01:40"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def replaced_lines(start: RunStart) -> list[str]:
    """The hit list: one line a pattern, with the number of modules that it replaced."""
    return [f"replaced {len(entry['hits']):>3}  {entry['pattern']}" for entry in start.replacements]


def start_line(start: RunStart) -> str:
    """Size, recipe, device and folder of a run in one line."""
    precision = "BF16, low precision off"
    if start.recipe is not None:
        precision = f"{start.recipe} in {start.low_precision_sites} GEMM sites"
    threads = f"{start.threads} {'thread' if start.threads == 1 else 'threads'}"
    return " · ".join(
        [
            f"{count(start.parameters)} parameters",
            precision,
            f"{start.device}, {threads}",
            f"{start.tokens_per_step:,} tokens/step",
            f"{start.folder}",
        ]
    )


@dataclass
class Tally:
    """What a view adds up over a run: speed since the last validation, skipped steps, time left."""

    steps: int = 0
    total_steps: int = 0
    skipped: int = 0
    last_validation: Validation | None = None
    now: Callable[[], float] = time.monotonic
    _began: float = field(default=0.0, repr=False)
    _tokens: int = field(default=0, repr=False)
    _window: float = field(default=0.0, repr=False)

    def add(self, result: StepResult, tokens_per_s: float) -> None:
        """One more step."""
        duration = result.tokens / tokens_per_s
        if not self.steps:
            self._began = self.now() - duration
        self.steps += 1
        self.skipped += result.skipped
        self._tokens += result.tokens
        self._window += duration

    def time_left(self) -> str:
        """From the mean time between steps so far, validations included."""
        if not self.steps:
            return "-:--"
        return clock((self.total_steps - self.steps) * (self.now() - self._began) / self.steps)

    def speed(self) -> float | None:
        """Mean tokens per second since this was last asked, None before the first step."""
        speed = self._tokens / self._window if self._window else None
        self._tokens, self._window = 0, 0.0
        return speed

    def validation_line(self, step: int, validation: Validation) -> str:
        """Step, loss, bits per byte, speed and skipped steps."""
        self.last_validation = validation
        speed = self.speed()
        parts = [
            f"step {step:>5}",
            f"val loss {validation.loss:.4f} nats/token",
            f"{validation.bits_per_byte:.3f} bits/byte",
            f"{speed:,.0f} tokens/s" if speed is not None else "before training",
            *([f"{self.skipped} skipped"] if self.skipped else []),
        ]
        return "   ".join(parts)


class View:
    """What both views of a run have: a tally, and the words for a run's end."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.tally = Tally()

    @property
    def bits_per_byte(self) -> str:
        """The last validation's, as the end of a sentence."""
        last = self.tally.last_validation
        return f", {last.bits_per_byte:.3f} bits/byte" if last is not None else ""

    @property
    def skipped_text(self) -> str:
        """How many steps were skipped, as the end of a sentence."""
        return f", {self.tally.skipped} skipped" if self.tally.skipped else ""
