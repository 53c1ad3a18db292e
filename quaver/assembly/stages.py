"""The order of the build, enforced: a step taken too early or twice is a start-up error, not a surprise later.

Why the order matters: sharding before quantising would gather plain FP32 weights; an optimiser before sharding
would train parameters that no longer belong to the model; recompute before sharding would rename nothing but
gather in the wrong phase. May import: errors.
"""

from __future__ import annotations

from quaver.errors import PlanError

MODEL_STAGES = ("meta", "plan", "install", "units", "shard_root", "activation_checkpoint", "optimizer")
UNIT_STAGES = ("materialise", "quantise", "shard")


class BuildOrder:
    """Which steps of a build are done, for the model and for each of its units."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.units: dict[str, list[str]] = {}

    def step(self, name: str) -> None:
        """Notes a step of the whole model; PlanError unless it is the next one."""
        wanted = MODEL_STAGES[len(self.done)] if len(self.done) < len(MODEL_STAGES) else None
        if wanted == "units" and name == "shard_root":
            self._require_units()
            self.done.append("units")
            wanted = "shard_root"
        if name != wanted:
            raise _out_of_order(name, self.done, wanted, MODEL_STAGES)
        self.done.append(name)

    def start_units(self, fqns: list[str]) -> None:
        """Names the units, once the replacements are installed."""
        if self.done != list(MODEL_STAGES[:3]):
            raise _out_of_order("units", self.done, MODEL_STAGES[len(self.done)], MODEL_STAGES)
        self.units = {fqn: [] for fqn in fqns}

    def unit_step(self, fqn: str, name: str) -> None:
        """Notes a step of one unit; PlanError unless it is that unit's next one."""
        if fqn not in self.units:
            raise PlanError(
                f"build step {name!r} before the replacements are installed, or of an unknown unit",
                where=fqn,
                remedy=f"the order is {' -> '.join(MODEL_STAGES)}",
            )
        done = self.units[fqn]
        wanted = UNIT_STAGES[len(done)] if len(done) < len(UNIT_STAGES) else None
        if name != wanted:
            raise _out_of_order(name, done, wanted, UNIT_STAGES, fqn)
        done.append(name)

    def _require_units(self) -> None:
        unfinished = [fqn for fqn, done in self.units.items() if len(done) < len(UNIT_STAGES)]
        if unfinished or not self.units:
            raise PlanError(
                f"build step 'shard_root' while {len(unfinished)} units are unfinished",
                where=", ".join(unfinished[:3]) or "no unit was started",
                remedy=f"each unit goes through {' -> '.join(UNIT_STAGES)} first",
            )


def _out_of_order(
    name: str, done: list[str], wanted: str | None, stages: tuple[str, ...], fqn: str | None = None
) -> PlanError:
    return PlanError(
        f"build step {name!r} out of order: "
        + (f"{wanted!r} is next" if wanted else "the build is finished"),
        where=(f"{fqn}, " if fqn else "") + f"done so far: {done or 'nothing'}",
        remedy=f"the order is {' -> '.join(stages)}",
    )
