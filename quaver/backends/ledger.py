"""The ledger: what GEMMs ran, per site, format and kernel, and whether that is what the plan promised.

A counter that only counts itself proves nothing, so it has two sides: *modules* announce each call (how many
forward passes, with which gradients wanted), *backends* record each GEMM they execute. `check` holds the two
against the plan and each other; a GEMM that went around the backend is a difference. May import: errors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from quaver.backends.contract import Gemm, GemmSite
from quaver.errors import LedgerError

Kind = Literal["dense", "grouped"]


def in_backward() -> bool:
    """True inside autograd's engine: pre-backward hooks, backward and recomputed forward passes alike."""
    return bool(torch._C._current_graph_task_id() != -1)


@dataclass(frozen=True)
class PlannedSite:
    """One low-precision GEMM site of the plan: dense modules by module FQN, grouped ones by parameter FQN.

    `required` GEMMs must run once for each training forward pass, whatever was announced; the others as often
    as the module announced them.
    """

    fqn: str
    kind: Kind
    format: str
    required: tuple[Gemm, ...] = ()


@dataclass
class Ledger:
    """Counts of executed GEMMs; one per model. All counters are plain integers, nothing touches a device."""

    recipe: str | None = None
    executed: Counter[tuple[str, Kind, str, str, str]] = field(default_factory=Counter)
    recomputed: Counter[tuple[str, Kind, str, str, str]] = field(default_factory=Counter)
    inference: Counter[tuple[str, Kind, str, str, str]] = field(default_factory=Counter)
    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    expert_tokens: dict[str, list[int]] = field(default_factory=dict)
    active: GemmSite | None = None
    _inference: set[str] = field(default_factory=set)

    def announce(self, fqn: str, *, input_grad: bool, weight_grad: bool) -> None:
        """A module's side: it is about to run one forward pass of `fqn`, and these gradients will be wanted.

        Under no_grad it is inference; a module whose input and weight are both frozen still trains the rest.
        """
        if in_backward():
            self.calls[fqn, "recomputed"] += 1
            return
        if not torch.is_grad_enabled():
            self.calls[fqn, "inference"] += 1
            self._inference.add(fqn)
            return
        self._inference.discard(fqn)
        self.calls[fqn, "fprop"] += 1
        if input_grad:
            self.calls[fqn, "dgrad"] += 1
        if weight_grad:
            self.calls[fqn, "wgrad"] += 1

    @contextmanager
    def record(self, site: GemmSite, *, kind: Kind, format: str, kernel: str) -> Iterator[None]:
        """A backend's side: runs around the kernel, and counts it once it has come back without an error."""
        before, self.active = self.active, site
        try:
            yield
        finally:
            self.active = before
        key = (site.fqn, kind, site.gemm, format, kernel)
        if site.gemm == "fprop" and in_backward():
            self.recomputed[key] += 1
        elif site.gemm == "fprop" and site.fqn in self._inference:
            self.inference[key] += 1
        else:
            self.executed[key] += 1

    def note_expert_tokens(self, fqn: str, counts: list[int]) -> None:
        """Tokens per expert of one training forward pass, summed over the run; zero at the end means idle."""
        if in_backward() or not torch.is_grad_enabled():
            return
        total = self.expert_tokens.setdefault(fqn, [0] * len(counts))
        for index, count in enumerate(counts):
            total[index] += count

    def idle_experts(self) -> list[str]:
        """`fqn[expert]` of every expert that has had no token so far: idle, not missing."""
        return [
            f"{fqn}[{index}]"
            for fqn, counts in self.expert_tokens.items()
            for index, count in enumerate(counts)
            if count == 0
        ]

    def differences(self, plan: Sequence[PlannedSite], *, micro_steps: int | None = None) -> list[str]:
        """Every way in which the executed GEMMs differ from the plan, one sentence each; empty if they agree.

        Args:
            plan: the planned sites.
            micro_steps: training forward passes that each site must have seen; None: at least one.
        """
        found = []
        planned = {site.fqn: site for site in plan}
        ran: Counter[tuple[str, str]] = Counter()
        again: Counter[str] = Counter()
        inferred: Counter[str] = Counter()
        for (fqn, kind, gemm, fmt, _), count in self.executed.items():
            ran[fqn, gemm] += count
            site = planned.get(fqn)
            if site is None:
                found.append(f"{fqn} {gemm}: {count} GEMMs of a module that is not in the plan")
            elif (site.kind, site.format) != (kind, fmt):
                found.append(f"{fqn} {gemm}: ran as {kind} {fmt}, planned as {site.kind} {site.format}")
        for (fqn, *_), count in self.recomputed.items():
            again[fqn] += count
        for (fqn, *_), count in self.inference.items():
            inferred[fqn] += count
        called = {fqn for fqn, _ in self.calls}
        for fqn in sorted(called - {*planned, *(key[0] for key in self.executed)}):
            found.append(f"{fqn}: called as a low-precision module, but not in the plan")
        for fqn in planned:
            wanted = self.calls[fqn, "fprop"]
            if micro_steps is not None and wanted != micro_steps:
                found.append(f"{fqn}: {wanted} training forward passes, {micro_steps} micro-steps were run")
            if micro_steps is None and wanted == 0:
                found.append(f"{fqn}: no training forward pass went through the low-precision module")
            for gemm in ("fprop", "dgrad", "wgrad"):
                if ran[fqn, gemm] != self.calls[fqn, gemm]:
                    found.append(
                        f"{fqn} {gemm}: {ran[fqn, gemm]} GEMMs through the backend, "
                        f"{self.calls[fqn, gemm]} announced"
                    )
                elif gemm in planned[fqn].required and ran[fqn, gemm] != wanted:
                    found.append(
                        f"{fqn} {gemm}: {ran[fqn, gemm]} GEMMs for {wanted} training forward passes, "
                        "and the plan has one each"
                    )
            for kind_of_pass, counted in (("recomputed", again), ("inference", inferred)):
                if counted[fqn] != self.calls[fqn, kind_of_pass]:
                    found.append(
                        f"{fqn} {kind_of_pass} fprop: {counted[fqn]} through the backend, "
                        f"{self.calls[fqn, kind_of_pass]} announced"
                    )
        return found

    def check(self, plan: Sequence[PlannedSite], *, micro_steps: int | None = None) -> None:
        """LedgerError listing the first differences, if there are any."""
        found = self.differences(plan, micro_steps=micro_steps)
        if found:
            more = f" (and {len(found) - 5} more)" if len(found) > 5 else ""
            raise LedgerError(
                f"the executed GEMMs are not those of the plan: {len(found)} differences{more}",
                where="; ".join(found[:5]),
                remedy="a GEMM went around the backend: call the module's own forward, never replace it",
            )

    def to_json(self, *, ok: bool) -> dict[str, Any]:
        """The document of ledger.json."""
        keys = sorted({*self.executed, *self.recomputed, *self.inference})
        entries = [
            {
                "fqn": key[0],
                "kind": key[1],
                "gemm": key[2],
                "format": key[3],
                "kernel": key[4],
                "count": self.executed[key],
                "recomputed": self.recomputed[key],
                "inference": self.inference[key],
            }
            for key in keys
        ]
        return {"recipe": self.recipe, "ok": ok, "entries": entries, "idle_experts": self.idle_experts()}
