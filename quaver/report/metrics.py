"""metrics.jsonl as typed lines; the one reader of that file.

Three kinds of line, told apart by their keys: training {"step", "loss", "grad_norm", "lr", "tokens",
"tokens_per_s", "skipped"}, validation {"step", "val_loss", "val_bpb"} and samples {"step", "samples"}.
Non-finite numbers are the strings "nan", "inf", "-inf". A step that was written twice (a run that went back
to a checkpoint) counts as it was written last. May import: errors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from quaver.errors import ConfigError

NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_LARGEST_INT = 2**53  # integers up to here are exact in the floats that charts are drawn with


@dataclass(frozen=True, slots=True)
class TrainingLine:
    """One optimiser step.

    Attributes:
        step: steps taken, counted from 1.
        loss: nats per token.
        grad_norm: L2 norm before clipping.
        lr: learning rate of the step.
        tokens: training tokens so far.
        tokens_per_s: tokens per second of this step.
        skipped: steps so far that updated nothing because something was not finite.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    tokens_per_s: float
    skipped: int


@dataclass(frozen=True, slots=True)
class ValidationLine:
    """One validation, after `step` steps: loss in nats per token, and in bits per byte of text."""

    step: int
    val_loss: float
    val_bpb: float


@dataclass(frozen=True, slots=True)
class Sample:
    """A prompt and what the model made of it."""

    prompt: str
    text: str


@dataclass(frozen=True, slots=True)
class SampleLine:
    """The continuations of one validation, after `step` steps."""

    step: int
    samples: tuple[Sample, ...]


@dataclass(frozen=True)
class Metrics:
    """A run's lines by kind, each in the order of steps.

    Attributes:
        training: optimiser steps.
        validation: validations.
        samples: continuations.
        repeated: lines that a later line of the same step and kind replaced.
        other: lines of a kind that this reader does not know.
        cut: the last line is incomplete, as a killed run leaves it, and does not count.
    """

    training: tuple[TrainingLine, ...]
    validation: tuple[ValidationLine, ...]
    samples: tuple[SampleLine, ...]
    repeated: int
    other: int
    cut: bool = False

    @property
    def steps(self) -> int:
        """The last step that was trained or validated."""
        return max((lines[-1].step for lines in (self.training, self.validation) if lines), default=0)

    @property
    def skipped(self) -> int:
        """Steps that updated nothing."""
        return self.training[-1].skipped if self.training else 0

    @property
    def non_finite(self) -> int:
        """Numbers that are not finite, over training and validation lines."""
        values = [
            v for line in self.training for v in (line.loss, line.grad_norm, line.lr, line.tokens_per_s)
        ]
        values += [v for line in self.validation for v in (line.val_loss, line.val_bpb)]
        return sum(not math.isfinite(value) for value in values)


def read_metrics(run_dir: str | Path) -> Metrics:
    """Reads `run_dir`/metrics.jsonl.

    Raises:
        ConfigError: no such folder or file, no lines, or a line that is not of the form above (file:line). An
            unfinished last line, without its newline, is left out: `cut`.
    """
    path = require_run_folder(run_dir) / "metrics.jsonl"
    training: dict[int, TrainingLine] = {}
    validation: dict[int, ValidationLine] = {}
    samples: dict[int, SampleLine] = {}
    repeated = other = 0
    lines_read, cut = _lines(path)
    for place, text in lines_read:
        fields = _Fields(place, text)
        step = fields.integer("step")
        found: list[tuple[dict[int, Any], Any]] = []
        if "loss" in fields.data:
            found.append((training, _training(step, fields)))
        if "val_loss" in fields.data:
            line = ValidationLine(step, fields.number("val_loss"), fields.number("val_bpb"))
            found.append((validation, line))
        if "samples" in fields.data:
            found.append((samples, SampleLine(step, fields.samples())))
        other += not found
        for lines, line in found:
            repeated += step in lines
            lines[step] = line
    if not training and not validation:
        raise ConfigError(
            "the run has no metrics yet",
            where=str(path),
            remedy="wait for its first step, or leave the run out",
        )
    return Metrics(
        training=tuple(training[step] for step in sorted(training)),
        validation=tuple(validation[step] for step in sorted(validation)),
        samples=tuple(samples[step] for step in sorted(samples)),
        repeated=repeated,
        other=other,
        cut=cut,
    )


def require_run_folder(run_dir: str | Path) -> Path:
    """The run's folder as a path; ConfigError if it is none."""
    folder = Path(run_dir)
    if not folder.is_dir():
        raise ConfigError(
            "there is no such run folder" if not folder.exists() else "a run is a folder, and this is none",
            where=str(folder),
            remedy="give a folder that `quaver train` wrote, such as runs/demo",
        )
    if not (folder / "metrics.jsonl").is_file():
        raise ConfigError(
            "the folder has no metrics.jsonl, so it is no run",
            where=str(folder),
            remedy="give a folder that `quaver train` wrote, such as runs/demo",
        )
    return folder


def _lines(path: Path) -> tuple[list[tuple[str, str]], bool]:
    """Each line with its place; and whether an unfinished last one was left out."""
    try:
        data = path.read_bytes()
        whole, newline, rest = data.rpartition(b"\n")
        cut = rest.startswith(b"{") and not _is_json(rest)  # a line that lacks nothing but its newline counts
        text = (whole + newline if cut else data).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the metrics cannot be read: {error}", where=str(path), remedy="restore the file from the run"
        ) from error
    numbered = enumerate(text.split("\n"), start=1)
    return [(f"{path}:{number}", line) for number, line in numbered if line.strip()], cut


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _training(step: int, fields: _Fields) -> TrainingLine:
    return TrainingLine(
        step=step,
        loss=fields.number("loss"),
        grad_norm=fields.number("grad_norm"),
        lr=fields.number("lr"),
        tokens=fields.integer("tokens"),
        tokens_per_s=fields.number("tokens_per_s"),
        skipped=fields.integer("skipped"),
    )


def _not_json(constant: str) -> NoReturn:
    raise ValueError(f'{constant} is no JSON number; write the string "nan", "inf" or "-inf"')


_DECODER = json.JSONDecoder(parse_constant=_not_json)


class _Fields:
    """One line's mapping; every look-up names the place of what is wrong."""

    def __init__(self, place: str, text: str) -> None:
        self._place = place
        try:
            data = _DECODER.decode(text)
        except (ValueError, RecursionError) as error:
            reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
            self._refuse(f"the line is not JSON: {reason}")
        if not isinstance(data, Mapping):
            self._refuse("the line is not a JSON object")
        self.data = data

    def integer(self, key: str) -> int:
        value = self._value(key)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _LARGEST_INT:
            self._refuse(f"{key!r} is {_shown(value)}, not a count")
        return value

    def number(self, key: str) -> float:
        value = self._value(key)
        if isinstance(value, str) and value in NON_FINITE:
            return NON_FINITE[value]
        if isinstance(value, bool) or not isinstance(value, int | float):
            self._refuse(f'{key!r} is {_shown(value)}, not a number (or "nan", "inf", "-inf")')
        try:
            return float(value)
        except OverflowError:
            self._refuse(f"{key!r} is too large for a number")

    def samples(self) -> tuple[Sample, ...]:
        value = self._value("samples")
        if not isinstance(value, list):
            self._refuse(f"'samples' is {_shown(value)}, not a list")
        found = []
        for item in value:
            texts = (item.get("prompt"), item.get("text")) if isinstance(item, Mapping) else (None, None)
            if not (isinstance(texts[0], str) and isinstance(texts[1], str)):
                self._refuse('a sample is not of the form {"prompt": text, "text": text}')
            found.append(Sample(texts[0], texts[1]))
        return tuple(found)

    def _value(self, key: str) -> Any:
        if key not in self.data:
            self._refuse(f"the line lacks {key!r}")
        return self.data[key]

    def _refuse(self, what: str) -> NoReturn:
        raise ConfigError(
            what, where=self._place, remedy="correct or remove the line; the other lines are untouched"
        )


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
