"""Loading: from a checkpoint of any recipe and any number of ranks into a run that is built and ready.

    digests -> names, shapes, dtypes -> data cursor, router counts -> tensors into live storage -> codes -> generators

Nothing is half right: keys are strict, and what does not fit is an error before the first tensor is read. The FP32
masters win over the BF16 model view, and quantised weights are derived from them anew.
May import: the room's files, low_precision, errors.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from quaver.checkpoint.dcp import read_tensors
from quaver.checkpoint.files import cannot_start
from quaver.checkpoint.index import Index, read_index
from quaver.checkpoint.keys import check_keys, tolerated_keys, wanted_keys
from quaver.checkpoint.manifest import Manifest, read_manifest, verify
from quaver.checkpoint.ranks import Ranks
from quaver.checkpoint.state import (
    STATE,
    RankRecord,
    RunRecord,
    TrainState,
    rank_file,
    read_counts,
    read_record,
)
from quaver.checkpoint.views import (
    MODEL,
    OPTIM,
    States,
    View,
    buffer_view,
    install_states,
    master_of,
    master_view,
    model_view,
    settle,
    state_view,
    whole_states,
)
from quaver.distributed import local_tensor
from quaver.errors import CheckpointError
from quaver.low_precision import quantised_weights, refresh


@dataclass(frozen=True)
class Loaded:
    """What was loaded.

    Attributes:
        step: the checkpoint's step.
        progress: the counters that were saved.
        recipe, config_digest, world_size: those of the run that saved it.
        rng: whether the random generators were set; with another number of ranks they cannot be.
    """

    step: int
    progress: dict[str, Any]
    recipe: str | None
    config_digest: str
    world_size: int
    rng: bool


def load(
    folder: Path,
    state: TrainState,
    *,
    masters: bool = True,
    optimizer: bool = True,
    rng: bool = True,
    loader: bool = True,
    group: dist.ProcessGroup | None = None,
    verified: bool = False,
) -> Loaded:
    """Loads a checkpoint into a run; all ranks together.

    Args:
        folder: one checkpoint, "step-00000100".
        state: what to load into; each rank gets the rows that its shards hold.
        masters: False starts from the BF16 logical weights instead, as inference and export see them.
        optimizer: also moments and steps, and the router's counts.
        rng: also the random generators, where the number of ranks is the same.
        loader: also the data cursor.
        group: of all ranks; None is the default group.
        verified: the digests were just checked, by `find_latest` or `verify`.

    Raises:
        CheckpointError: exit code 2; a damaged file, a missing or extra key, another shape or dtype, another
            tokeniser, other routers.
        ConfigError: the data is not that of the saved run.
    """
    folder, ranks = Path(folder), Ranks(group)
    manifest = ranks.first_does(lambda: read_manifest(folder)) if verified else verify(folder, ranks)
    settle(state.model)
    states = whole_states(state.model, state.optimizer)
    wanted = wanted_keys(state.model, states if optimizer else {})

    def check() -> tuple[Index, RunRecord, RankRecord | None]:
        index = read_index(folder, manifest)
        check_keys(index, wanted, tolerated_keys(state.model, optimizer), folder)
        record = _checked_record(folder, manifest, state)
        own = ranks.size == manifest.world_size
        rank_record = read_record(folder / rank_file(ranks.rank), RankRecord) if own else None
        if loader and state.loader is not None:
            _restore_loader(folder, record, state)
        if optimizer and state.router_bias is not None:
            _restore_counts(folder, manifest, state, ranks)
        return index, record, rank_record

    index, record, rank_record = ranks.all_do(check)[ranks.rank]
    _read(folder, index, state, states if optimizer else {}, ranks, masters=masters)
    if optimizer:
        install_states(state.optimizer, states)
    if quantised_weights(state.model):
        refresh(state.model)
    if rng and rank_record is not None:
        _restore_rng(folder, rank_record, ranks.rank)
    return Loaded(
        step=record.step,
        progress=record.progress,
        recipe=record.recipe,
        config_digest=record.config_digest,
        world_size=record.world_size,
        rng=rng and rank_record is not None,
    )


@torch.no_grad()
def _read(
    folder: Path, index: Index, state: TrainState, states: States, ranks: Ranks, *, masters: bool
) -> None:
    moments = state_view(state.model, states)
    if masters:
        tree = {MODEL: buffer_view(state.model), OPTIM: master_view(state.model) | moments}
        read_tensors(tree, folder, index, ranks)
        return
    weights: View = model_view(state.model)
    read_tensors({MODEL: weights, OPTIM: moments}, folder, index, ranks)
    for fqn, parameter in state.model.named_parameters():
        master_of(fqn, parameter).copy_(local_tensor(weights[fqn]))


def _checked_record(folder: Path, manifest: Manifest, state: TrainState) -> RunRecord:
    record = read_record(folder / STATE, RunRecord)
    told = (manifest.step, manifest.world_size, manifest.recipe)
    if (record.step, record.world_size, record.recipe) != told:
        raise cannot_start("the manifest and state.json speak of two different saves", where=folder)
    if record.tokenizer_digest != state.tokenizer_digest:
        raise cannot_start(
            "the checkpoint was trained with another tokeniser: its embeddings mean other tokens",
            where=f"{folder / STATE}: tokenizer_digest {record.tokenizer_digest[:12]}, "
            f"this run's is {state.tokenizer_digest[:12]}",
            remedy="set data.tokenizer (and data.sources, for bpe) to those of the saved run",
        )
    return record


def _restore_loader(folder: Path, record: RunRecord, state: TrainState) -> None:
    if record.loader is None:
        raise cannot_start("the checkpoint has no data cursor", where=folder / STATE)
    assert state.loader is not None
    state.loader.load_state_dict(record.loader)


def _restore_counts(folder: Path, manifest: Manifest, state: TrainState, ranks: Ranks) -> None:
    counts = read_counts(folder, ranks.rank, ranks.size, manifest.world_size)
    if counts is None:
        raise cannot_start("the checkpoint has no router counts", where=folder)
    assert state.router_bias is not None
    try:
        state.router_bias.load_state_dict(counts)
    except CheckpointError as error:
        error.exit_code = 2
        raise


def _restore_rng(folder: Path, record: RankRecord, rank: int) -> None:
    try:
        record.random.restore()
    except (ValueError, RuntimeError, TypeError, OverflowError) as error:
        raise cannot_start(
            "these are no states of random generators", where=folder / rank_file(rank)
        ) from error
