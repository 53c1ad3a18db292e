"""torch's distributed checkpoint as this room uses it: tensors out, tensors in, and errors that name a cause.

Each rank writes its shards to one .distcp file and reads only the rows that it needs, whatever ranks wrote them.
Reading runs nothing that the folder brings: index.json is checked data, tensors go through torch's weights-only
reader, and the pickled `.metadata`, which torch's own tools want, is not opened.
May import: the room's files, ranks, index, views; errors.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.storage import WriteResult

from quaver.checkpoint.background import Pace, give_way
from quaver.checkpoint.files import cannot_start, not_written, reason_of, write_durably
from quaver.checkpoint.index import DTYPES, INDEX, Index, Piece, index_of
from quaver.checkpoint.ranks import Ranks
from quaver.checkpoint.views import Tree, copied
from quaver.errors import CheckpointError

# saving ----------------------------------------------------------------------------------------------------


class Writer(FileSystemWriter):
    """torch's writer, one flushed file a rank; the first rank adds index.json.

    Args:
        folder: an empty one.
        pace: of a writer beside the training: its threads give way, and it pauses after each tensor.
    """

    def __init__(self, folder: Path, *, pace: Pace | None = None) -> None:
        super().__init__(folder)
        self.pace = pace
        self.not_copied: Exception | None = None

    def stage(  # type: ignore[override]  # async_save takes a future too
        self, state_dict: dict[str, Any]
    ) -> dict[str, Any] | Future[dict[str, Any]]:
        """The copy of a `live_tree` that an asynchronous save writes: on a CPU made beside the training too.

        Its thread does not give way: the next update waits for it.
        """
        on_device = any(tensor.device.type != "cpu" for view in state_dict.values() for tensor in view.values())
        if on_device:  # the copy would need a stream that waits for the training's
            return super().stage(state_dict)
        copying = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-copy")
        try:
            return copying.submit(self._copy, state_dict)
        finally:
            copying.shutdown(wait=False)

    def _copy(self, live: Tree) -> Tree:
        try:
            return copied(live)
        except Exception as error:
            # raised where torch tells all ranks of it: before that the others would wait for this one
            self.not_copied = error
            return live

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        """Writes this rank's file; OSError where the system refuses, which torch hides behind its zip writer's."""
        if self.pace is not None:
            give_way()
            self.pace.begin()
        if self.not_copied is not None:
            raise self.not_copied
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            refusal = _refusal(error)
            if refusal is None:
                raise
            raise OSError(refusal.errno, refusal.strerror, refusal.filename) from error

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Called once, when all ranks have written."""
        super().finish(metadata, results)
        write_durably(Path(self.path) / INDEX, index_of(metadata).to_bytes())


class PacedPlanner(DefaultSavePlanner):
    """torch's planner, which a writer asks for one tensor after the other."""

    def __init__(self, pace: Pace) -> None:
        super().__init__()
        self.pace = pace

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """The next tensor; a pause for the one before comes first."""
        self.pace()
        return super().resolve_data(write_item)


def _refusal(error: BaseException) -> OSError | None:
    """The operating system's own error on the way to this one."""
    before: BaseException | None = error
    while before is not None and not isinstance(before, OSError):
        before = before.__cause__ or before.__context__
    return before


def write_tensors(tree: Tree, folder: Path, ranks: Ranks) -> None:
    """Writes all tensors into an empty folder; all ranks together.

    Raises:
        CheckpointError: on all ranks, if any could not write.
    """
    _quiet(ranks)
    with _dcp_errors(lambda cause: not_written(folder, cause)):
        torch_dcp.save(
            tree, storage_writer=Writer(folder), process_group=ranks.group, no_dist=not ranks.initialised
        )


@dataclass(frozen=True)
class Writing:
    """A save beside the training.

    Args:
        copied: done when the training may change the tensors.
        written: done when everything is in its files; wait with `finish_writing`.
    """

    copied: Future[Any]
    written: Future[Any]


def start_writing(live: Tree, folder: Path, ranks: Ranks, pace: Pace) -> Writing:
    """Copies all tensors of a `live_tree` and writes them, in threads of its own.

    Args:
        pace: of the writing; the copy, for which the next update waits, is made without pauses.
        ranks: of a group that nothing else uses meanwhile, since the thread runs collectives on it.
    """
    _quiet(ranks)
    with _dcp_errors(lambda cause: not_written(folder, cause)):
        started = torch_dcp.async_save(
            live,
            storage_writer=Writer(folder, pace=pace),
            planner=PacedPlanner(pace),
            process_group=ranks.group,
            no_dist=not ranks.initialised,
        )
    if isinstance(started, Future):  # the copy is made
        at_once: Future[None] = Future()
        at_once.set_result(None)
        return Writing(at_once, started)
    return Writing(started.staging_completion, started.upload_completion)


def finish_writing(writing: Writing, folder: Path) -> None:
    """Waits for `start_writing`; raises as `write_tensors` does."""
    with _dcp_errors(lambda cause: not_written(folder, cause)):
        writing.written.result()


# loading ---------------------------------------------------------------------------------------------------


class Reader(FileSystemReader):
    """torch's reader, with metadata that was read and checked before, and pieces held to their description."""

    def __init__(self, folder: Path, index: Index) -> None:
        super().__init__(folder)
        self.index = index

    def read_metadata(self) -> Metadata:
        """From index.json; `.metadata` is a pickle, and is not opened."""
        return self.index.to_metadata()

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        """Reads each piece once and copies the rows that this rank wants."""
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self._piece(item).file, []).append(item)
        for name, items in by_file.items():
            with (Path(self.path) / name).open("rb") as file:
                for item in sorted(items, key=lambda item: self._piece(item).start):
                    self._read(file, item, planner)
        done: torch.futures.Future[None] = torch.futures.Future()
        done.set_result(None)
        return done

    def _piece(self, item: ReadItem) -> Piece:
        return cast(Piece, self.storage_data[item.storage_index])

    def _read(self, file: io.BufferedReader, item: ReadItem, planner: LoadPlanner) -> None:
        piece, key = self._piece(item), item.storage_index.fqn
        file.seek(piece.start)
        stored = torch.load(io.BytesIO(file.read(piece.length)), map_location="cpu", weights_only=True)
        dtype = DTYPES[self.index.tensors[key].dtype]
        fits = type(stored) is torch.Tensor and list(stored.shape) == piece.sizes and stored.dtype is dtype
        if not fits:
            raise ValueError(
                f"{key} in {piece.file} is not the {dtype} piece of shape {piece.sizes} of the index"
            )
        for dimension, (start, length) in enumerate(zip(item.storage_offsets, item.lengths)):
            stored = stored.narrow(dimension, start, length)
        target = planner.resolve_tensor(item).detach()
        target.copy_(stored)
        planner.commit_tensor(item, target)


def read_tensors(tree: Tree, folder: Path, index: Index, ranks: Ranks) -> None:
    """Reads the rows that this rank holds of every tensor of the tree into its storage; all ranks together.

    Raises:
        CheckpointError: exit code 2, on all ranks, if any could not read.
    """
    _quiet(ranks)
    with _dcp_errors(lambda cause: _not_read(folder, cause)):
        torch_dcp.load(
            cast("dict[str, Any]", tree),
            storage_reader=Reader(folder, index),
            process_group=ranks.group,
            no_dist=not ranks.initialised,
        )


def _not_read(folder: Path, cause: BaseException) -> CheckpointError:
    named = getattr(cause, "filename", None)
    return cannot_start(f"the checkpoint could not be read: {reason_of(cause)}", where=str(named or folder))


# both ------------------------------------------------------------------------------------------------------


@contextmanager
def _dcp_errors(named: Callable[[BaseException], CheckpointError]) -> Iterator[None]:
    """Turns what torch raises (no Exception, and with a traceback for each rank) into the room's own error."""
    try:
        yield
    except CheckpointException as error:
        causes = [pair[0] for _, pair in sorted(error.failures.items())]
        for cause in causes:
            if not isinstance(cause, Exception):
                raise cause from error  # Ctrl-C stays what it is
        raise named(causes[0] if causes else error) from error
    except (OSError, RuntimeError) as error:
        raise named(error) from error


def _quiet(ranks: Ranks) -> None:
    """Without torch.distributed torch warns that it assumes one process, which is what is meant."""
    if not ranks.initialised:  # for good: the warning may come later, from the thread of an asynchronous save
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
