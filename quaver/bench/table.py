"""All figures, which of them `--only` chooses, and the run that measures them. May import: all of this room."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from importlib.util import find_spec
from typing import Any

import torch

from quaver.bench.comparison import Group, Peer, Result
from quaver.bench.experts import experts_group, experts_peer_group
from quaver.bench.loop import saving_group, trainer_group
from quaver.bench.machine import cores, describe_machine, load_average
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
    """CapabilityError if a package that someone is held against cannot be used: no row is left out."""
    concerned: dict[str, tuple[Peer, list[str]]] = {}
    for group in chosen:
        for c in group.comparisons:
            for contestant in (c.ours, c.other):
                if contestant in group.peers:
                    peer = group.peers[contestant]
                    concerned.setdefault(peer.package, (peer, []))[1].append(c.name)
    for peer, names in concerned.values():
        trouble = _trouble(peer)
        if trouble is not None:
            raise CapabilityError(
                trouble,
                where=", ".join(names),
                remedy=f"{peer.install}, or leave these figures out: --only chooses others",
            )


def _trouble(peer: Peer) -> str | None:
    """What hinders the peer, found by importing what is used of it; None: nothing does."""
    if find_spec(peer.package) is None:
        return f"the peer {peer.package} is not installed"
    try:
        peer.load()
    except (ImportError, AttributeError, OSError) as error:  # not there, of another version, or a library of another
        return f"the peer {peer.package} is installed, but not fit to be measured: {error}"
    return None


def require_threads(threads: int) -> None:
    """ConfigError for more threads than this process has cores: they would take turns, and be timed doing so."""
    if threads > cores():
        raise ConfigError(
            f"{threads} threads are more than the cores that this process may use: {cores()}",
            where="--threads",
            remedy=f"at most --threads {cores()}, or allow more cores (taskset, the container's limits)",
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
        threads: of everything that is timed, at most one a core; the process gets its own number back.
        sizes: of layers and models.
        on_progress: told (group, rounds done, rounds in all).
        all_groups: what there is to choose from; None: everything.

    Raises:
        ConfigError: a glob matches nothing, or there are fewer cores than threads.
        CapabilityError: a chosen figure's peer is not installed, or not fit.
        QuaverError: a group has measured fewer rounds than it was asked for.
    """
    require_threads(threads)
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
