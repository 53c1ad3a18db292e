"""Turns: who is compared runs turn by turn, in an order that reverses each round, and only ratios are read.

A machine that grows slower or faster meanwhile does so for both; what one round loses to another program shows in
the spread and not in the median. Every turn begins with one untimed run, long contestants' too: the turn before left
caches and the process's free memory as its contestant likes them, and what is wanted is the time among one's own kind.
A rule for short ones only would make a figure jump where a contestant crosses the limit. Where rounds are consecutive
steps of one run (trainer, loader, checkpoint) nothing leads in. May import: nothing but the standard library.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

# What takes a turn: runs once and returns nothing, or how many units of work it did (steps, say).
Contestant = Callable[[], int | None]
Clock = Callable[[], float]

SHORTEST = 0.05  # seconds: a turn repeats its contestant until about this long, so that the clock's grain is nothing
MOST_REPEATS = 1000


@dataclass(frozen=True)
class Spread:
    """Median, smallest and largest of the ratios of all rounds."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Turn:
    """The timed part of one turn: its seconds, how often the contestant ran in it, and the units of work it did."""

    seconds: float
    runs: int
    units: int

    @property
    def per_unit(self) -> float:
        """Seconds that a unit of work took."""
        return self.seconds / self.units


def spread(ratios: list[float]) -> Spread:
    """Of at least one ratio."""
    return Spread(statistics.median(ratios), min(ratios), max(ratios))


def take_turns(
    contestants: Mapping[str, Contestant],
    rounds: int,
    *,
    clock: Clock = time.perf_counter,
    on_round: Callable[[int], None] | None = None,
    shortest: float = SHORTEST,
    leads_in: bool = True,
) -> list[dict[str, Turn]]:
    """The turn of each contestant in each round; odd rounds go backwards.

    Args:
        contestants: name -> what runs. Each runs twice before the first round.
        rounds: how many pairs a ratio will have.
        clock: seconds.
        on_round: told the number of rounds that are done.
        shortest: seconds that a turn lasts at least; shorter contestants are repeated.
        leads_in: each turn begins with a run that is not timed.
    """
    once = {name: _warm(contestant, clock) for name, contestant in contestants.items()}
    names, taken = list(contestants), []
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()  # a collection belongs to no turn
    try:
        for number in range(rounds):
            order = names if number % 2 == 0 else names[::-1]
            taken.append({name: _turn(contestants[name], once[name], clock, shortest, leads_in) for name in order})
            gc.collect()
            if on_round is not None:
                on_round(number + 1)
    finally:
        if collecting:
            gc.enable()
    return taken


def _warm(contestant: Contestant, clock: Clock) -> float:
    """Runs it until it is warm; the seconds of one more run."""
    contestant()
    start = clock()
    contestant()
    return clock() - start


def _turn(contestant: Contestant, once: float, clock: Clock, shortest: float, leads_in: bool) -> Turn:
    if leads_in:
        contestant()
    repeats = 1 if once >= shortest else min(MOST_REPEATS, int(shortest / max(once, 1e-9)) + 1)
    units, start = 0, clock()
    for _ in range(repeats):
        done = contestant()
        units += 1 if done is None else done
    return Turn(clock() - start, repeats, units)
