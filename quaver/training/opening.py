"""Which folder a run writes into, what it goes on from, and that no other run writes there meanwhile.

Nothing in an existing folder is changed here: what a folder says of its run must stay true if a resume is refused.
May import: checkpoint, distributed, config, errors, lock, run_folder.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from quaver.checkpoint import Found, find_latest
from quaver.checkpoint.files import cannot_start
from quaver.config import RunConfig, load_config
from quaver.distributed import on_rank_zero
from quaver.training.lock import run_lock
from quaver.training.run_folder import check_run_folder, create_run_folder, find_run_folder, write_config

CHECKPOINTS = "checkpoints"


@dataclass(frozen=True)
class Opening:
    """Where a run starts.

    Args:
        existing: the folder of the run that is resumed; None: a new run.
        found: the checkpoint that it goes on from; None: it starts at step 0.
        config: what to build: without `init_from` and `load_from` where all weights come from a checkpoint.
    """

    existing: Path | None
    found: Found | None
    config: RunConfig


@contextmanager
def opening(
    config: RunConfig,
    out: str | os.PathLike[str] | None,
    *,
    resume: bool,
    last_step: int,
    tell: Callable[[str], None],
) -> Iterator[Opening]:
    """Looks for the run to resume, or checks that a new one has a place; all ranks together.

    Raises:
        ConfigError: the folder exists (without `resume`), cannot be made, or another run writes into it.
        CheckpointError: exit code 2; there are checkpoints and none is usable, or the run has finished without any.
    """
    existing = on_rank_zero(lambda: find_run_folder(config.name, out)) if resume else None
    if existing is None:
        if resume:
            tell(f"nothing to resume at {out or f'runs/{config.name}*'}: a new run")
        on_rank_zero(lambda: check_run_folder(out))
        yield Opening(None, None, config)
        return
    with run_lock(existing):
        found = find_latest(existing / CHECKPOINTS)
        if found is None:
            on_rank_zero(lambda: _refuse_to_start_over(existing, last_step))
        yield Opening(existing, found, config if found is None else _from_checkpoint(config))


@contextmanager
def run_folder(opened: Opening, config: RunConfig, out: str | os.PathLike[str] | None) -> Iterator[Path]:
    """The folder to write into: the one that is resumed, or a new one with the config in it."""
    if opened.existing is not None:
        yield opened.existing
        return
    folder = on_rank_zero(lambda: create_run_folder(config.name, out))
    with run_lock(folder):
        on_rank_zero(lambda: write_config(folder, config))
        yield folder


def _refuse_to_start_over(folder: Path, last_step: int) -> None:
    """A run that has finished without a checkpoint would be trained again, over what it has left."""
    path = folder / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    if any(line.startswith(f'{{"step": {last_step}, "loss"') for line in lines):
        raise cannot_start(
            "the run has finished, and it saved no checkpoint to go on from",
            where=folder,
            remedy="start a new run, with checkpoint.every set where it is to be resumed",
        )


def _from_checkpoint(config: RunConfig) -> RunConfig:
    """Where a run first came from need not be there any more."""
    return load_config(config, ["model.init_from=null", "checkpoint.load_from=null"])
