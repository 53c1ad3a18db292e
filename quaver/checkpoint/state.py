"""Everything of a run that is no tensor: counters, data cursor, random states. Plain JSON, never a pickle.

One state.json for the run, one rank-00000.json for each rank. JSON keeps every float to the bit.
May import: files, manifest, ranks.
"""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, TypeVar

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import nn

from quaver.checkpoint.files import cannot_start, reason_of
from quaver.checkpoint.manifest import Manifest
from quaver.checkpoint.ranks import Ranks

STATE = "state.json"
Word = Annotated[int, Field(ge=0, lt=2**32)]


class Stateful(Protocol):
    """A loader, or a router bias: gives its state and takes it up again."""

    def state_dict(self) -> Mapping[str, Any]:
        """The state: JSON-able for a loader, int64 tensors for router counts."""

    def load_state_dict(self, state: Any, /) -> None:
        """Takes up a state of `state_dict`."""


@dataclass(frozen=True)
class TrainState:
    """What of a run goes into a checkpoint, and what one is loaded into.

    Args:
        model: sharded or not, in any recipe.
        optimizer: AdamW over the model's masters.
        progress: counters of the trainer: JSON-able numbers, strings, lists. Not looked at when loading.
        recipe: id of the low-precision recipe; None where low precision is off.
        config_digest: of the run's config; given back when loading, not compared.
        tokenizer_digest: of the tokeniser; a checkpoint of another one is refused.
        architecture: `meaning_of` the model's config; a checkpoint of a model with another one is refused.
        tokens_per_step: label tokens of one step over all ranks; given back when loading, not compared.
        loader: the training loader, whose cursor is one for all ranks.
        router_bias: its token counts; the biases themselves are buffers of the model.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    progress: Mapping[str, Any]
    recipe: str | None
    config_digest: str
    tokenizer_digest: str
    architecture: Mapping[str, Any] = field(default_factory=dict)
    tokens_per_step: int = 0
    loader: Stateful | None = None
    router_bias: Stateful | None = None


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    def to_bytes(self) -> bytes:
        """The file's bytes; TypeError for what JSON cannot hold."""
        return (json.dumps(self.model_dump()) + "\n").encode()


class RunRecord(_Record):
    """state.json: what is one for all ranks."""

    version: Literal[1] = 1
    step: int
    world_size: int
    recipe: str | None
    config_digest: str
    tokenizer_digest: str
    architecture: dict[str, Any]
    tokens_per_step: int
    progress: dict[str, Any]
    loader: dict[str, Any] | None

    @classmethod
    def of(cls, state: TrainState, step: int, world_size: int) -> RunRecord:
        """The record of a run as it is now."""
        return cls(
            step=step,
            world_size=world_size,
            recipe=state.recipe,
            config_digest=state.config_digest,
            tokenizer_digest=state.tokenizer_digest,
            architecture=dict(state.architecture),
            tokens_per_step=state.tokens_per_step,
            progress=dict(state.progress),
            loader=dict(state.loader.state_dict()) if state.loader is not None else None,
        )


class RandomStates(_Record):
    """Python's, NumPy's and torch's generators of one rank."""

    python_version: Literal[3]
    python_words: Annotated[list[Word], Field(min_length=625, max_length=625)]
    python_gauss: float | None
    numpy_words: Annotated[list[Word], Field(min_length=624, max_length=624)]
    numpy_position: Annotated[int, Field(ge=0, le=624)]
    numpy_gauss: float | None
    torch_bytes: str

    @classmethod
    def now(cls) -> RandomStates:
        """The states of this process's global CPU generators."""
        version, words, gauss = random.getstate()
        numpy = np.random.get_state(legacy=False)
        assert isinstance(numpy, dict)
        assert version == 3  # the one that every Python from 3.2 on writes
        return cls(
            python_version=3,
            python_words=list(words),
            python_gauss=gauss,
            numpy_words=numpy["state"]["key"].tolist(),
            numpy_position=int(numpy["state"]["pos"]),
            numpy_gauss=float(numpy["gauss"]) if numpy["has_gauss"] else None,
            torch_bytes=base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode(),
        )

    def restore(self) -> None:
        """Sets this process's global CPU generators; ValueError or RuntimeError for words that are no state."""
        random.setstate((self.python_version, tuple(self.python_words), self.python_gauss))
        np.random.set_state(
            {
                "bit_generator": "MT19937",
                "state": {"key": np.array(self.numpy_words, dtype=np.uint32), "pos": self.numpy_position},
                "has_gauss": int(self.numpy_gauss is not None),
                "gauss": self.numpy_gauss or 0.0,
            }
        )
        data = bytearray(base64.b64decode(self.torch_bytes, validate=True))
        torch.set_rng_state(torch.frombuffer(data, dtype=torch.uint8))


class RankRecord(_Record):
    """rank-00000.json: what each rank has of its own."""

    version: Literal[1] = 1
    random: RandomStates
    router_counts: dict[str, list[int]] | None

    @classmethod
    def of(cls, state: TrainState) -> RankRecord:
        """The record of this rank as it is now."""
        counts = state.router_bias.state_dict() if state.router_bias is not None else None
        return cls(
            random=RandomStates.now(),
            router_counts={fqn: row.tolist() for fqn, row in counts.items()} if counts is not None else None,
        )


def rank_file(rank: int) -> str:
    """The file of one rank's record."""
    return f"rank-{rank:05d}.json"


R = TypeVar("R", bound=_Record)


def read_record(path: Path, kind: type[R]) -> R:
    """A record from its file; CheckpointError with exit code 2 where it is missing or is not one."""
    try:
        return kind.model_validate(json.loads(path.read_bytes()))
    except OSError as error:
        raise cannot_start(
            f"a file of the checkpoint cannot be read: {reason_of(error)}", where=path
        ) from error
    except (ValueError, RecursionError, ValidationError) as error:
        raise cannot_start("a file of the checkpoint is not what it should be", where=path) from error


def read_counts(folder: Path, manifest: Manifest, ranks: Ranks) -> dict[str, torch.Tensor] | None:
    """The router counts that this rank takes up: its own, or with another number of ranks all of them on rank 0.

    Counts are summed over ranks before they are used, so that any split of the sum is exact. None where none
    were saved.
    """
    same = ranks.size == manifest.world_size
    total: dict[str, torch.Tensor] = {}
    for rank in [ranks.rank] if same else range(manifest.world_size):
        record = read_record(manifest.file(folder, rank_file(rank)), RankRecord)
        if record.router_counts is None:
            return None
        for fqn, row in record.router_counts.items():
            counts = torch.tensor(row, dtype=torch.int64)
            total[fqn] = total[fqn] + counts if fqn in total else counts
    if not same and not ranks.first:
        return {fqn: torch.zeros_like(row) for fqn, row in total.items()}
    return total
