"""The checkpoints of a run: all ranks save together, at once or beside the training, and fail together.

What a save does to the folder, in which order and why, is in publish.py.
May import: the room's files, optim (the optimiser inside a wrapper), errors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.hooks import RemovableHandle

from quaver.checkpoint.background import Pace, ShortTurns, give_way
from quaver.checkpoint.dcp import Writing, finish_writing, start_writing, write_tensors
from quaver.checkpoint.files import not_written, write_durably
from quaver.checkpoint.find import Found, find_latest, step_name
from quaver.checkpoint.manifest import FileEntry, Manifest, describe_files
from quaver.checkpoint.publish import Phase, SaveSteps
from quaver.checkpoint.ranks import Ranks
from quaver.checkpoint.state import STATE, RankRecord, RunRecord, TrainState, rank_file
from quaver.checkpoint.views import MODEL, OPTIM, live_tree, model_view, optimizer_view, settle
from quaver.optim import inner_optimizer


class CheckpointManager:
    """Saves, finds and deletes the checkpoints of one run. Every method but `close` is called by all ranks together.

    Args:
        folder: the run's checkpoints folder; made if it is not there.
        keep: newest checkpoints that are kept.
        asynchronous: write beside the training. At most one save is in flight; its error comes up at the next
            `poll`, `save`, `wait` or `close`.
        on_phase: told (step, phase) on the first rank, just before each phase begins; from the writing thread
            where saves are asynchronous.
        on_message: told what is worth a line, on the first rank.

    Raises:
        CheckpointError: the folder cannot be made, or leftovers of a crash cannot be removed.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        keep: int = 2,
        asynchronous: bool = False,
        on_phase: Callable[[int, Phase], None] | None = None,
        on_message: Callable[[str], None] | None = None,
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep {keep}: at least one checkpoint is kept")
        self.folder = Path(folder)
        self._steps = SaveSteps(self.folder, keep, on_phase or _ignore, on_message or _ignore)
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        # groups of their own: saves run beside the training's collectives, and agreeing runs beside saves
        self._groups = (
            [dist.new_group(backend="gloo") for _ in range(2 if asynchronous else 1)] if several else []
        )
        self._ranks = Ranks(self._groups[0] if several else None)
        self._executor = (
            ThreadPoolExecutor(1, thread_name_prefix="checkpoint", initializer=give_way)
            if asynchronous
            else None
        )
        self._pending: Future[Path] | None = None
        self._saved: Path | None = None
        self._turns, self._pace = ShortTurns(), Pace()
        self._holding: RemovableHandle | None = None  # the hook that makes the optimiser wait for a copy
        self._ranks.first_does(self._steps.clean)

    # saving ------------------------------------------------------------------------------------------------

    def save(self, step: int, state: TrainState) -> Path:
        """Saves the run as it is after `step` steps; returns where the checkpoint is, or will be.

        With `asynchronous` the tensors are copied while the next step computes its gradients; the next step of
        `state.optimizer` waits for the copy. Whoever changes masters or moments in another way calls `wait` before.

        Saving a step again that this manager has just saved does nothing.

        Raises:
            CheckpointError: on all ranks; the checkpoints before this one are untouched. With `asynchronous`,
                the error of the save before.
        """
        self.wait()
        final = self.folder / step_name(step)
        if self._saved == final:
            return final
        run, rank = RunRecord.of(state, step, self._ranks.size), RankRecord.of(state)
        settle(state.model)
        partial = self._ranks.first_does(lambda: self._steps.start(step))
        with self._dropped_on_failure(partial):
            self._ranks.all_do(lambda: self._write_records(partial, run, rank))
            if self._executor is None:
                tree = {MODEL: model_view(state.model), OPTIM: optimizer_view(state.model, state.optimizer)}
                write_tensors(tree, partial, self._ranks)
                self._saved = self._finish(partial, run)
            else:
                pace, optimizer = Pace(), inner_optimizer(state.optimizer)
                live = live_tree(state.model, state.optimizer)
                writing = start_writing(live, partial, self._ranks, pace)
                self._pending = self._executor.submit(self._finish_later, writing, partial, run, pace)
                self._pace = pace
                self._turns.begin()
                self._hold_updates(optimizer, writing)
        return final

    @property
    def in_flight(self) -> bool:
        """True from the start of an asynchronous save until a `poll` or `wait` has found it complete."""
        return self._pending is not None

    def poll(self) -> None:
        """Once a step: raises the error of an asynchronous save that has ended; does not wait for one that has not."""
        if self._pending is None:
            return
        ended = torch.tensor(int(self._pending.done()))
        if len(self._groups) > 1:  # the same answer on all ranks, so that they go on or end together
            dist.all_reduce(ended, op=dist.ReduceOp.MIN, group=self._groups[1])
        if bool(ended):
            self.wait()

    def wait(self) -> None:
        """Waits for a save in flight; raises its error."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self._pace.hurry()
            try:
                self._saved = pending.result()
            finally:
                self._turns.end()

    def close(self) -> None:
        """Waits for a save in flight, raises its error, and lets go of threads and process groups."""
        try:
            self.wait()
        finally:
            if self._executor is not None:
                self._executor.shutdown()
            for group in self._groups if dist.is_initialized() else []:
                dist.destroy_process_group(group)
            self._groups.clear()

    def abandon(self) -> None:
        """Leaves a save in flight as it is, for the next start to clean up; nothing is waited for or let go of."""
        self._pending = None
        self._pace.hurry()
        self._turns.end()
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # finding -----------------------------------------------------------------------------------------------

    def find_latest(self) -> Found | None:
        """The newest whole checkpoint of this run, as `quaver.checkpoint.find_latest`."""
        self.wait()
        return find_latest(self.folder, self._ranks)

    def protect(self, path: Path | str) -> None:
        """Never delete this checkpoint: another run may be loading from it."""
        self._steps.protected.add(Path(path).resolve())

    # the steps of a save -----------------------------------------------------------------------------------

    def _write_records(self, partial: Path, run: RunRecord, rank: RankRecord) -> None:
        try:
            write_durably(partial / rank_file(self._ranks.rank), rank.to_bytes())
            if self._ranks.first:
                write_durably(partial / STATE, run.to_bytes())
        except OSError as error:
            raise not_written(partial, error) from error

    def _finish_later(self, writing: Writing, partial: Path, run: RunRecord, pace: Pace) -> Path:
        with self._dropped_on_failure(partial):
            finish_writing(writing, partial)
            return self._finish(partial, run, pace)

    def _finish(self, partial: Path, run: RunRecord, pace: Pace | None = None) -> Path:
        """From flushed tensors to a checkpoint; ranks share the digesting, the first does the rest."""
        names = self._ranks.first_does(lambda: self._steps.written(partial, run.step))
        shares = self._ranks.all_do(lambda: _describe(partial, self._ranks.share(names), pace))
        files = {name: entry for share in shares for name, entry in share.items()}
        manifest = Manifest(step=run.step, world_size=run.world_size, recipe=run.recipe, files=files)
        return self._ranks.first_does(lambda: self._steps.publish(partial, manifest))

    def _hold_updates(self, optimizer: torch.optim.Optimizer, writing: Writing) -> None:
        """The optimiser's steps wait until its tensors are copied; an error of the copy is the save's.

        The hook stays until the next save has its own: nothing that ends the waiting for a save ends its copy.
        """
        if self._holding is not None:
            self._holding.remove()
        self._holding = optimizer.register_step_pre_hook(lambda *_: _until_done(writing.copied))

    @contextmanager
    def _dropped_on_failure(self, partial: Path) -> Iterator[None]:
        """A save that failed goes, which also makes room; one that was killed goes at the next start."""
        try:
            yield
        except Exception:
            if self._ranks.first:
                self._steps.drop(partial)
            raise


def _until_done(future: Future[Any]) -> None:
    wait_for([future])


def _ignore(*_: Any) -> None:
    """Nobody listens."""


def _describe(folder: Path, names: Sequence[str], pace: Pace | None) -> dict[str, FileEntry]:
    try:
        return describe_files(folder, names, pace)
    except OSError as error:
        raise not_written(folder, error) from error
