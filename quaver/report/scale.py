"""Axes: from the range of some numbers to a scale, its ticks and their labels. Imports the standard library.

Ticks stand at 1, 2 or 5 times a power of ten, at most about five of them; a positive range that spans more
than LOG_SPAN between its ends is drawn on a logarithmic axis where the chart allows it, because a linear one
would show its largest value alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

LOG_SPAN = 50.0
_EXTREME = 1e300  # a range must itself be a finite number


@dataclass(frozen=True)
class Scale:
    """Maps values of [low, high] to pixels of [start, end]; logarithmic if `log`."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """Pixel of `value`, clamped to the axis."""
        low, high, at = self.low, self.high, min(max(value, self.low), self.high)
        if self.log:
            low, high, at = math.log10(low), math.log10(high), math.log10(at)
        return self.start + (self.end - self.start) * ((at - low) / (high - low))


def make_scale(
    values: Sequence[float],
    start: float,
    end: float,
    *,
    log: bool = False,
    zero: bool = False,
    pad: float = 0.05,
) -> Scale:
    """A scale over the finite `values`, with a little air at both ends.

    Args:
        values: finite numbers; none at all gives the range [0, 1].
        start: pixel of the low end.
        end: pixel of the high end.
        log: allow a logarithmic axis where the values call for one.
        zero: let the axis begin at 0 where no value is negative.
        pad: share of the range that is added at each end.
    """
    low = max(min(values, default=0.0), -_EXTREME)
    high = min(max(values, default=1.0), _EXTREME)
    if log and low > 0 and high / low > LOG_SPAN:
        air = (high / low) ** pad
        return Scale(low / air, high * air, start, end, log=True)
    if zero and low >= 0:
        return Scale(0.0, high * (1 + pad) or 1.0, start, end)
    air = (high - low) * pad if high > low else abs(high) * 0.1 or 1.0
    return Scale(low - air, high + air, start, end)


def ticks(scale: Scale, count: int = 5) -> list[float]:
    """Round values inside the scale, ascending, about `count` of them."""
    if scale.log:
        return _log_ticks(scale.low, scale.high, count)
    step = _round_step((scale.high - scale.low) / count)
    first, last = math.ceil(scale.low / step), math.floor(scale.high / step)
    return [index * step for index in range(first, last + 1)]


def _round_step(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)


def _log_ticks(low: float, high: float, count: int) -> list[float]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    decades = [e for e in range(first, last + 1) if low <= 10.0**e <= high]
    if len(decades) >= 4:
        every = -(-len(decades) // count)
        return [10.0**e for e in decades[::every]]
    factors = (1, 2, 5) if len(decades) < 3 else (1, 3)
    found = [factor * 10.0**e for e in range(first, last + 1) for factor in factors]
    return [value for value in found if low <= value <= high]


def tick_labels(values: Sequence[float]) -> list[str]:
    """Labels of one axis: just enough digits to tell ticks apart, large ones as 20k, small ones as 2e-4."""
    largest = max((abs(value) for value in values), default=0.0)
    if largest == 0:
        return ["0" for _ in values]
    log = len(values) > 2 and not math.isclose(values[1] - values[0], values[-1] - values[-2], rel_tol=1e-6)
    if log or largest >= 1e15 or largest < 1e-2:
        return [short(value) for value in values]
    for size, sign in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, "")):
        if largest >= size * (10 if sign == "k" else 1):
            break
    step = (values[1] - values[0]) / size if len(values) > 1 else largest / size
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    return [_minus(f"{value / size:.{digits}f}{sign}") if value else "0" for value in values]


def short(value: float, digits: int = 3) -> str:
    """A number in few characters: 0.0003 -> 3e-4, 0.25, 3.14, 1,234, 12.3M."""
    if not math.isfinite(value):
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "−inf")
    if not 1 <= abs(value) < 1e5:
        value = float(f"{value:.{digits - 1}e}")  # so that 999,999 is 1M, not 1000k
    size = abs(value)
    if size == 0:
        return "0"
    if size < 1e-2 or size >= 1e15:
        mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e")
        mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
        return _minus(f"{mantissa}e{int(exponent)}")
    if size < 1e5:
        decimals = max(0, digits - 1 - math.floor(math.log10(size)))
        text = f"{value:,.{decimals}f}"
        return _minus(text.rstrip("0").rstrip(".") if "." in text else text)
    for limit, sign in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= limit:
            return _minus(f"{value / limit:.{digits}g}{sign}")
    raise AssertionError(value)


def _minus(text: str) -> str:
    return "−" + text[1:] if text.startswith("-") else text
