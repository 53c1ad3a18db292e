"""What a figure of the speed table is: a name, who is held against whom, and the floor that must be met.

May import: timing, errors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Protocol

from quaver.bench.sizes import Sizes
from quaver.bench.timing import Contestant, spread, take_turns
from quaver.errors import QuaverError

OnRound = Callable[[int], None]


@dataclass(frozen=True)
class Comparison:
    """One figure: time of `ours` over time of `other`, so that below 1 is faster.

    Args:
        name: as `--only` matches it.
        ours, other: names of contestants of its group.
        target: the largest ratio that is accepted; None where none is set.
        what: one line for a reader.
    """

    name: str
    ours: str
    other: str
    target: float | None
    what: str


@dataclass(frozen=True)
class Result:
    """A figure: median, smallest and largest ratio over the pairs, and the median seconds of ours and of the other."""

    name: str
    what: str
    ratio: float
    target: float | None
    pairs: int
    min: float
    max: float
    seconds: tuple[float, float] | None = None

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None where there is none."""
        return None if self.target is None else self.ratio <= self.target

    def to_json(self) -> dict[str, Any]:
        """As `quaver bench --json` writes it."""
        return {
            "name": self.name,
            "ratio": self.ratio,
            "target": self.target,
            "pairs": self.pairs,
            "min": self.min,
            "max": self.max,
            "met": self.met,
            "seconds": self.seconds,
            "what": self.what,
        }


class Rounds(Protocol):
    """Runs the contestants that are needed for some rounds: seconds per unit of each, round by round."""

    def __call__(
        self, sizes: Sizes, needed: frozenset[str], pairs: int, on_round: OnRound
    ) -> list[dict[str, float]]:
        """Every needed contestant has a time in every round."""


@dataclass(frozen=True)
class Peer:
    """A package that someone is held against.

    Args:
        package: its name.
        install: the command that installs the version that was compared.
        load: imports all that is used of it; ImportError or AttributeError where something is not there.
    """

    package: str
    install: str
    load: Callable[[], object]


@dataclass(frozen=True)
class Group:
    """Comparisons that share contestants, and so their turns.

    Args:
        name: shown while it runs.
        comparisons: its figures.
        rounds: runs the contestants.
        peers: what a contestant needs that Quaver does not: contestant -> package.
    """

    name: str
    comparisons: tuple[Comparison, ...]
    rounds: Rounds
    peers: Mapping[str, Peer] = field(default_factory=dict)

    def needed(self) -> frozenset[str]:
        """The contestants that its comparisons speak of."""
        return frozenset(name for c in self.comparisons for name in (c.ours, c.other))

    def run(self, sizes: Sizes, pairs: int, on_round: OnRound) -> list[Result]:
        """All its figures, in order.

        Raises:
            QuaverError: the rounds ended before their number was full: what was asked for would not be what is shown.
        """
        times = self.rounds(sizes, self.needed(), pairs, on_round)
        if len(times) != pairs:
            raise QuaverError(
                f"{len(times)} rounds were measured where {pairs} were asked for: no figure is made of them",
                where=f"the group {self.name}",
                remedy="measure again; if it stays, this is a mistake in Quaver",
            )
        return [_result(comparison, times) for comparison in self.comparisons]


Opened = AbstractContextManager[Mapping[str, Contestant]]


def turns(open_contestants: Callable[[Sizes, frozenset[str]], Opened]) -> Rounds:
    """Rounds of contestants that are plain functions, built once and let go of after the last turn."""

    def rounds(sizes: Sizes, needed: frozenset[str], pairs: int, on_round: OnRound) -> list[dict[str, float]]:
        with open_contestants(sizes, needed) as contestants:
            chosen = {name: contestants[name] for name in contestants if name in needed}
            taken = take_turns(chosen, pairs, on_round=on_round)
        return [{name: turn.per_unit for name, turn in one.items()} for one in taken]

    return rounds


def _result(comparison: Comparison, times: list[dict[str, float]]) -> Result:
    ratios = [one[comparison.ours] / one[comparison.other] for one in times]
    found = spread(ratios)
    return Result(
        comparison.name,
        comparison.what,
        found.median,
        comparison.target,
        len(ratios),
        found.low,
        found.high,
        (median(one[comparison.ours] for one in times), median(one[comparison.other] for one in times)),
    )
