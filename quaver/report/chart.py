"""One chart: from the series of some runs to SVG geometry. Templates place it, no number is computed there.

Every coordinate is a pixel of a fixed view box; the page scales it. Values that are not finite break the line
and are marked on the upper edge. Bands are the invisible columns that show the values of a step under the
pointer. May import: `scale.py`, `thin.py`.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from quaver.report.scale import Scale, make_scale, short, tick_labels, ticks
from quaver.report.thin import Point, bucket_means, thin

HEIGHT, TOP, BOTTOM = 294, 24, 246  # of the view box, and the plot's upper and lower edge in it
LEFT, MARGIN = 52, 8  # the plot's left edge, and what is free at its right
NARROW, WIDE = 600, 1254  # widths of the view box: beside another chart, across both columns
MEANS = 60  # points of the bold line that is drawn over a noisy one
_MOST_DOTS = 40
_BANDS = 60
_POINTS = 2400  # thinned points of all runs of a chart together, before min/max doubles them


@dataclass(frozen=True)
class Spec:
    """What a chart shows.

    Attributes:
        key: identifies the chart in the page.
        title: what is shown.
        unit: of the vertical axis.
        log: allow a logarithmic axis.
        zero: begin at 0.
        noisy: draw the raw line faint, and bucket means over it.
        dots: mark each value, where there are few.
        wide: draw it across both columns.
    """

    key: str
    title: str
    unit: str
    log: bool = False
    zero: bool = False
    noisy: bool = False
    dots: bool = False
    wide: bool = False

    @property
    def width(self) -> int:
        """Width of the view box."""
        return WIDE if self.wide else NARROW

    @property
    def right(self) -> int:
        """The plot's right edge."""
        return self.width - MARGIN


@dataclass(frozen=True)
class Series:
    """The numbers of one run: ascending steps, as many values."""

    run: str
    steps: Sequence[int]
    values: Sequence[float]


@dataclass(frozen=True)
class Line:
    """One polyline ("x,y x,y ...") of run number `run`; `kind`: "raw", "mean" (over a raw one) or "line"."""

    run: int
    kind: str
    points: str
    title: str


@dataclass(frozen=True)
class Mark:
    """A point of its own: a dot of a sparse line, or the place of non-finite values."""

    run: int
    x: str
    y: str
    title: str


@dataclass(frozen=True)
class Band:
    """A column from `x` of width `width`: the value of each run there, shown while the pointer is over it."""

    x: str
    width: str
    at: str
    title: str
    label: str
    values: tuple[tuple[int, str], ...]
    dots: tuple[Mark, ...]


@dataclass(frozen=True)
class Chart:
    """Geometry of one chart; `x_ticks` and `y_ticks` are (pixel, label)."""

    spec: Spec
    log: bool
    x_ticks: tuple[tuple[str, str], ...]
    y_ticks: tuple[tuple[str, str], ...]
    lines: tuple[Line, ...]
    dots: tuple[Mark, ...]
    gaps: tuple[Mark, ...]
    bands: tuple[Band, ...]
    non_finite: int

    @property
    def empty(self) -> bool:
        """Nothing was measured."""
        return not self.lines and not self.dots and not self.gaps


def build_chart(spec: Spec, series: Sequence[Series]) -> Chart:
    """Geometry of `series`, one a run in the order of colours; a run without numbers keeps its colour."""
    finite = [value for one in series for value in one.values if math.isfinite(value)]
    last = max((one.steps[-1] for one in series if one.steps), default=0)
    x = make_scale([0, last or 1], LEFT, spec.right, pad=0.0)
    y = make_scale(finite, BOTTOM, TOP, log=spec.log, zero=spec.zero)
    drawn = _Drawing(x, y, max(20, min(400, _POINTS // max(1, len(series)))))
    for index, one in enumerate(series):
        drawn.add(index, one, spec)
    x_values, y_values = [v for v in ticks(x, 10 if spec.wide else 6) if v == int(v)], ticks(y)
    return Chart(
        spec=spec,
        log=y.log,
        x_ticks=tuple((px(x(v)), label) for v, label in zip(x_values, tick_labels(x_values))),
        y_ticks=tuple((px(y(v)), label) for v, label in zip(y_values, tick_labels(y_values))),
        lines=tuple(sorted(drawn.lines, key=lambda line: line.kind != "raw")),
        dots=tuple(drawn.dots),
        gaps=tuple(drawn.gaps),
        bands=_bands(series, x, y, 2 * _BANDS if spec.wide else _BANDS),
        non_finite=sum(not math.isfinite(value) for one in series for value in one.values),
    )


class _Drawing:
    """Collects the marks of the runs of one chart."""

    def __init__(self, x: Scale, y: Scale, buckets: int) -> None:
        self.x, self.y, self.buckets = x, y, buckets
        self.lines: list[Line] = []
        self.dots: list[Mark] = []
        self.gaps: list[Mark] = []

    def add(self, run: int, series: Series, spec: Spec) -> None:
        """Adds one run's line, dots and gaps."""
        thinned = thin(series.steps, series.values, self.buckets)
        smooth = spec.noisy and len(series.steps) >= 2 * MEANS
        for stretch in thinned.stretches:
            if len(stretch) > 1:
                kind = "raw" if smooth else "line"
                self.lines.append(Line(run, kind, self._points(stretch), series.run))
            if len(stretch) == 1 or (spec.dots and len(series.steps) <= _MOST_DOTS):
                self.dots += [self._dot(run, series.run, point) for point in stretch]
        if smooth:
            means = bucket_means(series.steps, series.values, MEANS)
            if len(means) > 1:
                self.lines.append(Line(run, "mean", self._points(means), f"{series.run}, mean"))
        for gap in thinned.gaps:
            where = f"step {gap.first:,}" if gap.first == gap.last else f"steps {gap.first:,} to {gap.last:,}"
            title = f"{series.run}, {where}: {gap.kinds}" + (
                f" ({gap.count} values)" if gap.count > 1 else ""
            )
            self.gaps.append(Mark(run, px(self.x((gap.first + gap.last) / 2)), px(TOP), title))

    def _points(self, points: Sequence[Point]) -> str:
        return " ".join(f"{px(self.x(step))},{px(self.y(value))}" for step, value in points)

    def _dot(self, run: int, name: str, point: Point) -> Mark:
        step, value = point
        return Mark(run, px(self.x(step)), px(self.y(value)), f"{name}, step {step:,}: {short(value, 5)}")


def _bands(series: Sequence[Series], x: Scale, y: Scale, most: int) -> tuple[Band, ...]:
    """One band a step where there are few steps, else evenly spread ones; each shows the steps next to it."""
    centres = sorted({step for one in series for step in one.steps})
    if len(centres) > most:
        last = len(centres) - 1
        centres = [centres[round(i * last / (most - 1))] for i in range(most)]
    edges = [LEFT, *((x(a) + x(b)) / 2 for a, b in pairwise(centres)), x.end]
    bands = []
    for centre, begin, end in zip(centres, edges, edges[1:]):
        values: list[tuple[int, str]] = []
        dots: list[Mark] = []
        titles = [f"step {centre:,}"]
        for run, one in enumerate(series):
            step, value = _nearest(one, centre)
            if step is None or not begin <= x(step) <= end:
                continue
            values.append((run, short(value, 4)))
            titles.append(f"{one.run}: {short(value, 5)}" + ("" if step == centre else f" (step {step:,})"))
            if math.isfinite(value):
                dots.append(Mark(run, px(x(step)), px(y(value)), ""))
        if values:
            text = "\n".join(titles)
            place = (px(begin), px(end - begin), px(x(centre)))
            bands.append(Band(*place, text, f"step {centre:,}", tuple(values), tuple(dots)))
    return tuple(bands)


def _nearest(series: Series, step: int) -> tuple[int | None, float]:
    if not series.steps:
        return None, math.nan
    right = bisect_left(series.steps, step)
    near = [i for i in (right - 1, right) if 0 <= i < len(series.steps)]
    best = min(near, key=lambda i: abs(series.steps[i] - step))
    return series.steps[best], series.values[best]


def px(value: float) -> str:
    """A pixel coordinate to a tenth."""
    return f"{value:.1f}".removesuffix(".0")
