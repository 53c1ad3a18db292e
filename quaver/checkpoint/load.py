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
from quaver.checkpoint.model_config import differences, told
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
        recipe, config_digest, world_size, tokens_per_step: those of the run that saved it.
        rng: whether the random generators were set; with another number of ranks they cannot be.
    """

    step: int
    progress: dict[str, Any]
    recipe: str | None
    config_digest: str
    world_size: int
    tokens_per_step: int
    rng: bool


def load(
    folder: Path | str,
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
            model of the same shapes, another tokeniser, other routers.
        ConfigError: the data is not that of the saved run.
    """
    folder, ranks = Path(folder), Ranks(group)
    manifest = ranks.first_does(lambda: read_manifest(folder)) if verified else verify(folder, ranks)
    settle(state.model)
    states = whole_states(state.model, state.optimizer) if optimizer else {}
    checked = ranks.each_does(lambda: _check(folder, manifest, state, states, ranks, optimizer=optimizer))
    ranks.each_does(lambda: _restore_objects(folder, checked, state, loader=loader, counts=optimizer))
    _read(folder, checked.index, state, states, ranks, masters=masters)
    install_states(state.optimizer, states)
    if quantised_weights(state.model):
        refresh(state.model)
    own = checked.own if rng else None
    ranks.each_does(lambda: _restore_rng(folder, own, ranks.rank))
    return Loaded(
        step=checked.run.step,
        progress=checked.run.progress,
        recipe=checked.run.recipe,
        config_digest=checked.run.config_digest,
        world_size=checked.run.world_size,
        tokens_per_step=checked.run.tokens_per_step,
        rng=own is not None,
    )


def read_run(folder: Path | str) -> RunRecord:
    """What a checkpoint says of the run that saved it; CheckpointError with exit code 2 where it cannot be read."""
    folder = Path(folder)
    return read_record(read_manifest(folder).file(folder, STATE), RunRecord)


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


@dataclass(frozen=True)
class _Checked:
    """What was read of a checkpoint beside its tensors, all of it found right."""

    index: Index
    run: RunRecord
    own: RankRecord | None  # this rank's, if the checkpoint is one of as many ranks
    counts: dict[str, torch.Tensor] | None


def _check(
    folder: Path, manifest: Manifest, state: TrainState, states: States, ranks: Ranks, *, optimizer: bool
) -> _Checked:
    index = read_index(folder, manifest)
    check_keys(index, wanted_keys(state.model, states), tolerated_keys(state.model, optimizer), folder)
    run = read_record(manifest.file(folder, STATE), RunRecord)
    if (run.step, run.world_size, run.recipe) != (manifest.step, manifest.world_size, manifest.recipe):
        raise cannot_start("the manifest and state.json speak of two different saves", where=folder)
    if run.tokenizer_digest != state.tokenizer_digest:
        raise cannot_start(
            "the checkpoint was trained with another tokeniser: its embeddings mean other tokens",
            where=f"{folder / STATE}: tokenizer_digest {run.tokenizer_digest[:12]}, "
            f"this run's is {state.tokenizer_digest[:12]}",
            remedy="set data.tokenizer (and data.sources, for bpe) to those of the saved run",
        )
    other = differences(run.architecture, state.architecture)
    if other:
        raise cannot_start(
            f"the checkpoint is of another model, though its shapes fit: {told(other)}",
            where=folder / STATE,
            remedy="use the model that was saved (model.config_overrides)",
        )
    same = ranks.size == manifest.world_size
    own = read_record(manifest.file(folder, rank_file(ranks.rank)), RankRecord) if same else None
    counts = read_counts(folder, manifest, ranks) if optimizer and state.router_bias is not None else None
    return _Checked(index, run, own, counts)


def _restore_objects(
    folder: Path, checked: _Checked, state: TrainState, *, loader: bool, counts: bool
) -> None:
    if loader and state.loader is not None:
        if checked.run.loader is None:
            raise cannot_start("the checkpoint has no data cursor", where=folder / STATE)
        state.loader.load_state_dict(checked.run.loader)
    if counts and state.router_bias is not None:
        if checked.counts is None:
            raise cannot_start("the checkpoint has no router counts", where=folder)
        try:
            state.router_bias.load_state_dict(checked.counts)
        except CheckpointError as error:
            error.exit_code = 2
            raise


def _restore_rng(folder: Path, record: RankRecord | None, rank: int) -> None:
    if record is None:
        return
    try:
        record.random.restore()
    except (ValueError, RuntimeError, TypeError, OverflowError) as error:
        raise cannot_start(
            "these are no states of random generators", where=folder / rank_file(rank)
        ) from error
