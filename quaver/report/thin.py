"""Fewer points, the same picture: min/max bucketing, bucket means, gaps. Imports the standard library.

A line of 100,000 steps has a few hundred pixels to lie on. Keeping the least and the greatest value of each
bucket of steps leaves every spike and dip where it was; averaging or taking each n-th would hide them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Point = tuple[int, float]


@dataclass(frozen=True)
class Gap:
    """Where a line breaks: `count` non-finite values of steps `first` to `last`; `kinds`: "nan, inf"."""

    first: int
    last: int
    count: int
    kinds: str


@dataclass(frozen=True)
class Thinned:
    """What is left of a series: unbroken stretches of points, and the gaps in it."""

    stretches: tuple[tuple[Point, ...], ...]
    gaps: tuple[Gap, ...]


def thin(steps: Sequence[int], values: Sequence[float], buckets: int) -> Thinned:
    """At most two points for each of `buckets` equal ranges of steps, besides the first and the last point.

    Args:
        steps: ascending.
        values: as many; the non-finite ones break the line, those of one bucket as one gap.
        buckets: ranges of steps; a series of at most 2 * buckets points is kept whole.
    """
    stretches: list[list[Point]] = [[]]
    gaps: list[Gap] = []
    for begin, end in _bounds(steps, buckets):
        finite = [i for i in range(begin, end) if math.isfinite(values[i])]
        if finite:
            low, high = min(finite, key=values.__getitem__), max(finite, key=values.__getitem__)
            kept = {low, high} | ({finite[0]} if begin == 0 else set())
            kept |= {finite[-1]} if end == len(steps) else set()
            stretches[-1] += [(steps[i], values[i]) for i in sorted(kept)]
        if len(finite) < end - begin:
            lost = [i for i in range(begin, end) if not math.isfinite(values[i])]
            kinds = sorted({str(values[i]) for i in lost})
            gaps.append(Gap(steps[lost[0]], steps[lost[-1]], len(lost), ", ".join(kinds)))
            stretches.append([])
    return Thinned(tuple(tuple(stretch) for stretch in stretches if stretch), tuple(gaps))


def _bounds(steps: Sequence[int], buckets: int) -> list[tuple[int, int]]:
    """Index ranges of the buckets, empty ones left out; one a point where there are few points."""
    count = len(steps)
    if count <= 2 * buckets:
        return [(i, i + 1) for i in range(count)]
    span = steps[-1] - steps[0] + 1
    places = [(step - steps[0]) * buckets // span for step in steps]
    found, begin = [], 0
    for i in range(1, count + 1):
        if i == count or places[i] != places[begin]:
            found.append((begin, i))
            begin = i
    return found


def bucket_means(steps: Sequence[int], values: Sequence[float], buckets: int) -> list[Point]:
    """Mean step (rounded) and mean of the finite values of each of `buckets` equal ranges of steps."""
    means: list[Point] = []
    for begin, end in _bounds(steps, buckets):
        finite = [i for i in range(begin, end) if math.isfinite(values[i])]
        if finite:
            mean = math.fsum(values[i] / len(finite) for i in finite)
            means.append((round(sum(steps[i] for i in finite) / len(finite)), mean))
    return means
