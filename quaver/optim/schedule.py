"""The learning rate of a step, as a pure function.

A schedule with no state of its own cannot drift: a resumed run, a skipped step and a plot all ask the same
function. `total_steps` is the length of the schedule, not of the run, so that a run which stops early keeps
the rates of the full one. Imports the standard library and `errors` alone.
"""

from __future__ import annotations

import math
from fractions import Fraction

from quaver.errors import ConfigError

KINDS = ("cosine", "linear", "constant", "wsd")


def warmup_steps_from_ratio(ratio: float, total_steps: int) -> int:
    """Number of warm-up steps that a share of the schedule means: ceil(ratio * total_steps).

    The ratio is taken as the decimal that was written, so 0.1 of 30 steps is 3 (the binary product,
    3.0000000000000004, would round up to 4). Raises ConfigError where the ratio is outside [0, 1].
    """
    return _share_of_steps(ratio, total_steps, "warmup")


def learning_rate(
    step: int,
    *,
    total_steps: int,
    lr: float,
    kind: str = "cosine",
    warmup_steps: int = 0,
    final_ratio: float = 0.1,
    decay_ratio: float = 0.2,
) -> float:
    """Learning rate of optimiser step `step`, counted from 0.

    With s = step, N = total_steps, W = warmup_steps, f = final_ratio:

    - s < W (every kind): lr * (s + 1) / (W + 1), so the first step trains and step W is the first at the full
      rate.
    - cosine:   lr * (f + (1 - f) * (1 + cos(pi * p)) / 2),  p = (s - W) / (N - W)
    - linear:   lr * (1 - (1 - f) * p),                      p = (s - W) / (N - W)
    - constant: lr
    - wsd:      lr until the last D = ceil(decay_ratio * N) steps, then lr * (1 - (1 - f) * p),
      p = (s - (N - D)) / D (warm-up, stable, decay; linear decay)

    The rate f * lr is that of step N, the step after the last one: no step of the run is spent at f * lr = 0.

    Raises ConfigError for an unknown kind, a step outside [0, N], or phases that do not fit into N steps.
    """
    decay_steps = _share_of_steps(decay_ratio, total_steps, "decay") if kind == "wsd" else 0
    _check(step, total_steps, kind, warmup_steps, decay_steps, final_ratio)
    if step < warmup_steps:
        return lr * ((step + 1) / (warmup_steps + 1))
    if kind == "constant":
        return lr
    start = total_steps - decay_steps if kind == "wsd" else warmup_steps
    if step <= start:
        return lr
    progress = (step - start) / (total_steps - start)
    if kind == "cosine":
        return lr * (final_ratio + (1.0 - final_ratio) * 0.5 * (1.0 + math.cos(math.pi * progress)))
    return lr * (1.0 - (1.0 - final_ratio) * progress)


def _share_of_steps(ratio: float, total_steps: int, phase: str) -> int:
    if not 0.0 <= ratio <= 1.0:
        raise ConfigError(
            f"the {phase} ratio {ratio} is not a share of the schedule",
            where=f"optimizer.schedule.{phase}_ratio",
            remedy="give a number from 0 to 1",
        )
    return math.ceil(Fraction(repr(float(ratio))) * total_steps)


def _check(step: int, total: int, kind: str, warmup: int, decay: int, final_ratio: float) -> None:
    where, section = "", "optimizer.schedule"
    if kind not in KINDS:
        raise ConfigError(
            f"{kind!r} is not a schedule",
            where=f"{section}.kind",
            remedy=f"choose one of {', '.join(KINDS)}",
        )
    if total < 1:
        what, where, remedy = (
            f"a schedule of {total} steps is empty",
            "training.steps",
            "give at least 1 step",
        )
    elif not 0 <= step <= total:
        what = f"step {step} lies outside a schedule of {total} steps"
        where, remedy = "training.steps", "raise training.steps; a longer run needs a longer schedule"
    elif warmup < 0 or warmup + decay > total:
        what = f"{warmup} warm-up steps and {decay} decay steps do not fit into {total} steps"
        where, remedy = section, "shorten the warm-up or the decay, or raise training.steps"
    elif not 0.0 <= final_ratio <= 1.0:
        what = f"the final ratio {final_ratio} is not a share of the peak rate"
        where, remedy = f"{section}.final_ratio", "give a number from 0 to 1"
    if where:
        raise ConfigError(what, where=where, remedy=remedy)
