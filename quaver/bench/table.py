"""All figures, which of them `--only` chooses, and the run that measures them. May import: all of this room."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from importlib.util import find_spec
from typing import Any

import torch

from quaver.bench.comparison import Group, Result
from quaver.bench.experts import experts_group, experts_peer_group
from quaver.bench.loop import saving_group, trainer_group
from quaver.bench.machine import describe_machine, load_average
from quaver.bench.operators import linear_group, linear_peer_group, quantise_group
from quaver.bench.sizes import FULL, Sizes
from quaver.bench.steps import step_group
from quaver.errors import CapabilityError, ConfigError

PAIRS = 7

OnProgress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class BenchReport:
    """The machine and the figures."""

    machine: dict[str, Any]
    results: tuple[Result, ...]

    def to_json(self) -> dict[str, Any]:
        """As `quaver bench --json` writes it."""
        return {"machine": self.machine, "results": [result.to_json() for result in self.results]}


def groups() -> tuple[Group, ...]:
    """Every group, the quick ones first."""
    return (
        quantise_group(),
        linear_group(),
        linear_peer_group(),
        experts_group(),
        experts_peer_group(),
        step_group(),
        trainer_group(),
        saving_group(),
    )


def chosen_groups(all_groups: Sequence[Group], only: Sequence[str]) -> list[Group]:
    """The groups with the comparisons that the globs match; all of them where there is no glob.

    Raises:
        ConfigError: a glob that matches no name.
    """
    if not only:
        return list(all_groups)
    names = [comparison.name for group in all_groups for comparison in group.comparisons]
    for pattern in only:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(
                f"no benchmark is named {pattern!r}",
                where="--only",
                remedy=f"a name or a glob of these: {', '.join(names)}",
            )
    chosen = []
    for group in all_groups:
        kept = tuple(c for c in group.comparisons if any(fnmatchcase(c.name, p) for p in only))
        if kept:
            chosen.append(replace(group, comparisons=kept))
    return chosen


def require_peers(chosen: Sequence[Group]) -> None:
    """CapabilityError if a package that someone is held against is not installed: no row is left out."""
    for group in chosen:
        for contestant in sorted(group.needed() & group.peers.keys()):
            package = group.peers[contestant]
            if find_spec(package) is None:
                names = [c.name for c in group.comparisons if contestant in (c.ours, c.other)]
                raise CapabilityError(
                    f"the peer {package} is not installed",
                    where=", ".join(names),
                    remedy=f"pip install {package} (part of quaver[dev]), or choose others with --only",
                )


def run_bench(
    only: Sequence[str] = (),
    *,
    pairs: int = PAIRS,
    threads: int = 1,
    sizes: Sizes = FULL,
    on_progress: OnProgress | None = None,
    all_groups: Sequence[Group] | None = None,
) -> BenchReport:
    """Measures the chosen figures.

    Args:
        only: globs over names; none: all figures.
        pairs: rounds of each figure; a claim takes at least 7.
        threads: of everything that is timed; the process gets its own number back.
        sizes: of layers and models.
        on_progress: told (group, rounds done, rounds in all).
        all_groups: what there is to choose from; None: everything.

    Raises:
        ConfigError: a glob matches nothing.
        CapabilityError: a chosen figure's peer is not installed.
    """
    chosen = chosen_groups(groups() if all_groups is None else all_groups, only)
    require_peers(chosen)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        machine = describe_machine()
        results: list[Result] = []
        for group in chosen:

            def on_round(done: int, name: str = group.name) -> None:
                if on_progress is not None:
                    on_progress(name, done, pairs)

            on_round(0)
            results += group.run(sizes, pairs, on_round)
        machine["load_average_after"] = load_average()
    finally:
        torch.set_num_threads(before)
    return BenchReport(machine, tuple(results))
