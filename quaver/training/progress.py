"""How far a run is: the counters that a step moves, and that a checkpoint keeps.

May import: evaluate, step.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from quaver.errors import CheckpointError
from quaver.training.step import StepResult


@dataclass
class Progress:
    """Counters of a run.

    Args:
        step: steps taken; a skipped one counts.
        updates: steps that updated: the schedule's clock.
        tokens: label tokens seen, over all ranks.
        skipped: steps that were skipped.
        skipped_in_a_row: of those, the last ones without an update between.
        validated_step: step of the last validation that was due; -1 before the first.
        val_loss, val_bpb: what it gave.
    """

    step: int = 0
    updates: int = 0
    tokens: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0
    validated_step: int = -1
    val_loss: float = float("nan")
    val_bpb: float = float("nan")

    def count(self, result: StepResult) -> None:
        """Counts one step."""
        self.step += 1
        self.tokens += result.tokens
        self.updates += not result.skipped
        self.skipped += result.skipped
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if result.skipped else 0

    def to_json(self) -> dict[str, Any]:
        """Plain numbers; floats go as hexadecimal text, which JSON cannot round."""
        return {k: v.hex() if isinstance(v, float) else v for k, v in asdict(self).items()}

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> Progress:
        """The counters of a checkpoint; CheckpointError with exit code 2 where they are not that."""
        fields = asdict(cls())
        try:
            if saved.keys() != fields.keys():
                raise ValueError(f"fields {sorted(saved)}")
            values: dict[str, Any] = {
                k: float.fromhex(v) if isinstance(fields[k], float) else _count(k, v)
                for k, v in saved.items()
            }
        except (TypeError, ValueError, OverflowError) as error:
            raised = CheckpointError(
                f"the run's counters in the checkpoint are not readable: {error}",
                where="state.json: progress",
            )
            raised.exit_code = 2
            raise raised from error
        return cls(**values)


def _count(name: str, value: Any) -> int:
    """A counter as it was saved; nothing is rounded or converted to make one."""
    if type(value) is not int:
        raise ValueError(f"{name} is {value!r}")
    return value
