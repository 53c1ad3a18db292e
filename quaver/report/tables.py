"""Rows of the page's tables, from runs. May import: the other modules of this room but `page.py`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from quaver.report.metrics import SampleLine
from quaver.report.run import Run
from quaver.report.scale import short

ABSENT = "–"
SHOWN_SAMPLES = 6  # validations whose continuations are shown, spread evenly, the last one always
SHOWN_CHARACTERS = 1500  # of one continuation


@dataclass(frozen=True)
class SummaryRow:
    """One run in the summary, as text; `delta` is the final validation loss against the first run's."""

    name: str
    recipe: str
    parameters: str
    steps: str
    tokens: str
    val_loss: str
    delta: str
    val_bpb: str
    tokens_per_s: str
    skipped: int
    non_finite: int


@dataclass(frozen=True)
class Difference:
    """A key and its value in each run, as text; None where a run lacks it."""

    key: str
    values: tuple[str | None, ...]


@dataclass(frozen=True)
class SampleBlock:
    """Continuations of one run: those shown, and how many validations there were."""

    run: int
    name: str
    shown: tuple[SampleLine, ...]
    total: int


def summary_rows(runs: Sequence[Run]) -> list[SummaryRow]:
    """One row a run; figures that were not measured show as a dash."""
    base = _final_loss(runs[0])
    rows = []
    for index, run in enumerate(runs):
        metrics = run.metrics
        last = metrics.validation[-1] if metrics.validation else None
        speeds = [line.tokens_per_s for line in metrics.training if math.isfinite(line.tokens_per_s)]
        rows.append(
            SummaryRow(
                name=run.name,
                recipe=run.recipe or ABSENT,
                parameters=short(run.parameters) if run.parameters is not None else ABSENT,
                steps=f"{metrics.steps:,}",
                tokens=short(metrics.training[-1].tokens) if metrics.training else ABSENT,
                val_loss=_fixed(last.val_loss if last else None),
                delta=_delta(_final_loss(run), base) if index else "",
                val_bpb=_fixed(last.val_bpb if last else None),
                tokens_per_s=f"{median(speeds):,.0f}" if speeds else ABSENT,
                skipped=metrics.skipped,
                non_finite=metrics.non_finite,
            )
        )
    return rows


def _final_loss(run: Run) -> float | None:
    return run.metrics.validation[-1].val_loss if run.metrics.validation else None


def _fixed(value: float | None) -> str:
    if value is None:
        return ABSENT
    return f"{value:.4f}" if math.isfinite(value) and 1e-3 <= abs(value) < 1e6 else short(value, 5)


def _delta(value: float | None, base: float | None) -> str:
    if value is None or base is None or not base or not math.isfinite(value) or not math.isfinite(base):
        return ""
    return f"{100 * (value / base - 1):+.2f} %".replace("-", "−")


def differences(tables: Sequence[Mapping[str, str] | None]) -> list[Difference]:
    """Keys whose values differ between tables, in the order of first appearance; None tables are left out."""
    known = [table for table in tables if table is not None]
    found = []
    for key in _keys(known):
        if len({table.get(key) for table in known}) > 1:
            found.append(Difference(key, tuple(table.get(key) if table else None for table in tables)))
    return found


def side_by_side(tables: Sequence[Mapping[str, str] | None]) -> list[Difference]:
    """All keys with the value of each table."""
    keys = _keys(table for table in tables if table is not None)
    return [Difference(key, tuple(table.get(key) if table else None for table in tables)) for key in keys]


def hit_counts(runs: Sequence[Run]) -> list[tuple[str, tuple[int | None, ...]]]:
    """Each replacement pattern with the number of modules it hit in each run; None where the run lacks it."""
    keys = _keys(run.replacements for run in runs if run.replacements is not None)
    return [(key, tuple((run.replacements or {}).get(key) for run in runs)) for key in keys]


def sample_blocks(runs: Sequence[Run]) -> list[SampleBlock]:
    """The continuations to show: of each run that has some, evenly spread validations, the last included."""
    blocks = []
    for index, run in enumerate(runs):
        lines = run.metrics.samples
        if not lines:
            continue
        count, last = min(SHOWN_SAMPLES, len(lines)), len(lines) - 1
        places = sorted({round(i * last / max(1, count - 1)) for i in range(count)} | {last})
        blocks.append(SampleBlock(index, run.name, tuple(lines[i] for i in places), len(lines)))
    return blocks


def _keys(tables: Iterable[Mapping[str, object]]) -> list[str]:
    """Keys of all tables, each once, in the order in which they first appear."""
    return list(dict.fromkeys(key for table in tables for key in table))
