"""What a run proves of itself: its GEMMs are those of the plan, and every parameter that trains got a gradient.

May import: assembly, backends, distributed, disk, step, errors.
"""

from __future__ import annotations

from pathlib import Path

import torch

from quaver.assembly import Assembly
from quaver.backends import Ledger
from quaver.distributed import gather_rows
from quaver.errors import LedgerError
from quaver.training.disk import write_json
from quaver.training.step import StepResult


class Proof:
    """Holds a run's ledger against its plan, and writes ledger.json.

    Args:
        assembly: the built model with its plan and ledger.
        started_at: step of the checkpoint that this process went on from; 0 without one.
    """

    def __init__(self, assembly: Assembly, started_at: int) -> None:
        self.assembly = assembly
        self.started_at = started_at
        self.sites = assembly.sites()
        self.proven = False  # the GEMMs of a first step, or of a whole run, were held against the plan

    def check(self, step: int, result: StepResult | None = None) -> None:
        """LedgerError unless the steps up to `step` ran the plan's GEMMs, and `result` lacks no gradient."""
        self._check(step)
        if result is not None:
            check_gradients(result)
        self.proven = True

    def _check(self, step: int) -> None:
        if self.assembly.policy is not None:
            micro_steps = (step - self.started_at) * self.assembly.config.gradient_accumulation_steps
            self.assembly.ledger.check(self.sites, micro_steps=micro_steps)

    def write(self, path: Path, step: int) -> None:
        """Writes ledger.json; its `ok` says that a check has held and that one would hold now."""
        ok = self.proven or self.assembly.policy is None  # without low precision there is nothing to prove
        try:
            self._check(step)
        except LedgerError:
            ok = False  # the check itself has raised, or raises after this
        document = self.assembly.ledger.to_json(ok=ok)
        if self.started_at:
            document["resumed_from"] = self.started_at  # what ran before, an earlier ledger has told
        write_json(path, document)


def check_gradients(result: StepResult) -> None:
    """LedgerError for a parameter that trains and gets no gradient: it would stand still without a word."""
    if result.without_gradient:
        raise LedgerError(
            f"{len(result.without_gradient)} parameters train, but step 1 gave them no gradient",
            where=", ".join(result.without_gradient[:5]),
            remedy="a forward pass went around them; freeze what is not meant to train (model.freeze)",
        )


def sum_expert_tokens(ledger: Ledger) -> None:
    """Makes the expert counts those of all ranks: an expert is idle if no rank has sent it a token."""
    for fqn in sorted(ledger.expert_tokens):
        counts = gather_rows(torch.tensor(ledger.expert_tokens[fqn])).sum(0)
        ledger.expert_tokens[fqn] = [int(count) for count in counts]
