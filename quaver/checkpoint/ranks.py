"""Ranks that succeed together or fail together: no rank may go on, or wait for ever, while another has failed.

May import: files, errors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

import torch.distributed as dist

from quaver.checkpoint.files import reason_of
from quaver.errors import CheckpointError

T = TypeVar("T")


@dataclass(frozen=True)
class _Failure:
    """An error on its way to the other ranks: plain data."""

    what: str
    where: str | None
    remedy: str | None
    exit_code: int


class Ranks:
    """The ranks of a process group, or this process alone where none is initialised.

    Args:
        group: None is the default group. Object collectives run on it, so it wants a CPU backend.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.initialised = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank(group) if self.initialised else 0
        self.size = dist.get_world_size(group) if self.initialised else 1

    @property
    def first(self) -> bool:
        """True on the rank that does what is done once."""
        return self.rank == 0

    def share(self, items: Sequence[T]) -> Sequence[T]:
        """This rank's share of the items."""
        return items[self.rank :: self.size]

    def all_do(self, action: Callable[[], T]) -> list[T]:
        """Every rank acts; all get all results, in rank order, or all raise the first failing rank's error."""
        if self.size == 1:
            return [action()]
        outcome: T | _Failure
        mine: Exception | None = None
        try:
            outcome = action()
        except Exception as error:
            mine, outcome = error, self._describe(error)
        outcomes: list[T | _Failure] = [outcome] * self.size
        dist.all_gather_object(outcomes, outcome, group=self.group)
        return [_result(outcome, mine) for outcome in outcomes]

    def each_does(self, action: Callable[[], T]) -> T:
        """Every rank acts and gets its own result, or all raise the first failing rank's error."""
        results: list[T] = []
        self.all_do(lambda: results.append(action()))
        return results[0]

    def first_does(self, action: Callable[[], T]) -> T:
        """The first rank acts; all get its result or its error."""
        if self.size == 1:
            return action()
        outcome: list[T | _Failure | None] = [None]
        mine: Exception | None = None
        if self.first:
            try:
                outcome = [action()]
            except Exception as error:
                mine, outcome = error, [self._describe(error)]
        source = dist.get_global_rank(self.group, 0) if self.group is not None else 0
        dist.broadcast_object_list(outcome, src=source, group=self.group)
        return _result(cast("T | _Failure", outcome[0]), mine)

    def _describe(self, error: Exception) -> _Failure:
        if isinstance(error, CheckpointError):
            return _Failure(error.what, error.where, error.remedy, error.exit_code)
        return _Failure(f"rank {self.rank} failed: {reason_of(error)}", None, None, CheckpointError.exit_code)


def _result(outcome: T | _Failure, mine: Exception | None) -> T:
    if not isinstance(outcome, _Failure):
        return outcome
    if mine is not None and not isinstance(mine, CheckpointError):
        raise mine
    error = CheckpointError(outcome.what, where=outcome.where, remedy=outcome.remedy)
    error.exit_code = outcome.exit_code
    raise error from mine
