"""Turns: who is compared runs turn by turn, in an order that reverses each round, and only ratios are read.

A machine that grows slower or faster meanwhile does so for both; what one round loses to another program shows in
the spread and not in the median. May import: nothing but the standard library.
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
LEADS_IN = 1.0  # seconds: where any contestant is shorter, all run once untimed at the start of each turn, since the
# one before left caches and the process's free memory as it likes them; what is wanted is the time among one's own kind


@dataclass(frozen=True)
class Spread:
    """Median, smallest and largest of the ratios of all rounds."""

    median: float
    low: float
    high: float


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
) -> list[dict[str, float]]:
    """Seconds per unit of each contestant in each round; odd rounds go backwards.

    Args:
        contestants: name -> what runs. Each runs twice before the first round, and once at the start of each turn
            where any of them is short.
        rounds: how many pairs a ratio will have.
        clock: seconds.
        on_round: told the number of rounds that are done.
        shortest: seconds that a turn lasts at least; shorter contestants are repeated.
    """
    once = {name: _warm(contestant, clock) for name, contestant in contestants.items()}
    names, taken = list(contestants), []
    leads_in = min(once.values()) < LEADS_IN
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


def _turn(contestant: Contestant, once: float, clock: Clock, shortest: float, leads_in: bool) -> float:
    if leads_in:
        contestant()
    repeats = 1 if once >= shortest else min(MOST_REPEATS, int(shortest / max(once, 1e-9)) + 1)
    start, units = clock(), 0
    for _ in range(repeats):
        done = contestant()
        units += 1 if done is None else done
    return (clock() - start) / units
