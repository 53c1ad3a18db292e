"""Several weighted sources as one sequence of samples whose every prefix holds the shares.

Which source gives sample g follows a fixed period with, for every prefix, each source's count less than one
away from its share: the earliest-deadline schedule of Tijdeman, "The chairman assignment problem", Discrete
Mathematics 32 (1980). (Taking the source furthest behind, the obvious rule, can be more than one away.) The
period is a table, so any position is a look-up: nothing is replayed on a resume.
May import `quaver.errors` and numpy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from quaver.errors import ConfigError

LONGEST_PERIOD = 1 << 16


class Interleave:
    """Places sample g of the mixture: which source gives it and which of that source's samples it is.

    Args:
        weights: per source, positive; read as the decimals that they print as (0.1 is one tenth).

    Raises:
        ConfigError: the shares repeat only after more than 65,536 samples.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        counts = counts_per_period(weights)
        self.period = sum(counts)
        self._counts = np.array(counts, dtype=np.int64)
        self._sources = np.array(_schedule(counts), dtype=np.int64)
        self._ranks = np.empty(self.period, dtype=np.int64)
        for source, count in enumerate(counts):
            self._ranks[self._sources == source] = np.arange(count)

    def place(self, samples: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """For global sample numbers: the source of each, and its running number within that source."""
        periods, slots = np.divmod(samples, self.period)
        sources = self._sources[slots]
        return sources, periods * self._counts[sources] + self._ranks[slots]


def counts_per_period(weights: Sequence[float]) -> list[int]:
    """Samples of each source in the shortest period that holds the shares exactly.

    Raises:
        ConfigError: that period is longer than 65,536 samples.
    """
    exact = [Fraction(str(weight)) for weight in weights]
    shares = [weight / sum(exact) for weight in exact]
    period = math.lcm(*(share.denominator for share in shares))
    if period > LONGEST_PERIOD:
        rounded = ", ".join(str(max(round(float(share), 3), 0.001)) for share in shares)
        raise ConfigError(
            f"the weights {', '.join(map(str, weights))} make shares that repeat only after {period} samples",
            where="data.sources[*].weight",
            remedy=f"round them, for instance to {rounded}",
        )
    return [int(share * period) for share in shares]


def _schedule(counts: list[int]) -> list[int]:
    """Tijdeman's schedule of one period: after t slots, source i gave x_i with |x_i - t p_i| <= 1 - 1/(2n-2).

    `counts` are the samples of each of the n sources in a period, p_i = counts[i] / sum(counts) the shares.
    All in whole numbers.
    """
    period = sum(counts)
    if len(counts) == 1:
        return [0] * period
    parts = 2 * len(counts) - 2
    given = [0] * len(counts)

    def last_slot(i: int) -> int:
        """The slot before which source i must have given its next sample, so as not to fall behind."""
        return (parts * (given[i] + 1) - 1) * period // (parts * counts[i])

    order = []
    for t in range(1, period + 1):
        # Those that may give now without getting more than their share allows; never none of them.
        ready = [i for i, count in enumerate(counts) if parts * (count * t - given[i] * period) >= period]
        chosen = min(ready, key=last_slot)
        given[chosen] += 1
        order.append(chosen)
    return order
