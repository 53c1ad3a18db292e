"""`HFSource`: the weights of a Hugging Face folder under a model's own names, every key accounted for.

A model asks for FQNs and shapes and gets exact FP32 upcasts, one tensor at a time, so that a sharded build needs
memory for one. `check` holds all headers against all wishes before anything is allocated; `finish` says what
became of every key, and raises where one was not read.
May import: models (the config reader), this room's `hf_folder`, `hf_layout`, `hf_match` and `model_config`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from quaver.checkpoint.hf_folder import file_inside, open_folder
from quaver.checkpoint.hf_layout import piece_of
from quaver.checkpoint.hf_match import Matcher, Part, Reads
from quaver.checkpoint.model_config import differences, meaning_of
from quaver.models import load_hf_config

Shapes = Mapping[str, Sequence[int]]

_CHUNK_BYTES = 64 << 20  # what is read at a time of a large tensor


@dataclass(frozen=True)
class ImportReport:
    """Where everything came from and went.

    Attributes:
        folder: the source.
        files: the weight files read.
        loaded: FQN -> the source keys that its values came from.
        dropped: source key -> why no parameter takes it.
        unused_files: weight files beside them -> why they were not read.
    """

    folder: str
    files: tuple[str, ...]
    loaded: dict[str, tuple[str, ...]]
    dropped: dict[str, str]
    unused_files: dict[str, str]

    def as_json(self) -> dict[str, Any]:
        """JSON types only; the keys behind a loaded tensor are counted, not listed."""
        return {
            "folder": self.folder,
            "files": list(self.files),
            "loaded": {fqn: len(keys) for fqn, keys in self.loaded.items()},
            "dropped": dict(self.dropped),
            "unused_files": dict(self.unused_files),
        }


class HFSource:
    """The weights of one folder, opened (headers only).

    Args:
        folder: holds model.safetensors, or shards with or without an index, or pytorch_model.bin; and a
            config.json, without which no multi-token prediction layer can be told from an unknown one.

    Raises:
        CheckpointError: as `open_folder`.
        ConfigError: a config.json that transformers cannot read.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._stored = open_folder(self.folder)
        self.config: PreTrainedConfig | None = None
        if "config.json" in {path.name for path in self.folder.iterdir()}:
            self.config = load_hf_config(file_inside(self.folder, "config.json", str(self.folder)))
        self._matcher = Matcher(self.folder, self._stored.tensors, self.config)
        self._reads = Reads()
        self._loaded: dict[str, tuple[str, ...]] = {}

    @property
    def keys(self) -> tuple[str, ...]:
        """All keys of the files."""
        return tuple(self._stored.tensors)

    def differences(self, hf_config: PreTrainedConfig) -> dict[str, tuple[Any, Any]]:
        """Config fields that decide what weights mean and differ: name -> (this folder's, the given one's).

        Shapes cannot show these (a rope base, a routing scale); empty where the folder has no config.json.
        """
        if self.config is None:
            return {}
        return differences(meaning_of(self.config), meaning_of(hf_config))

    def check(self, shapes: Shapes, *, whole: frozenset[str] = frozenset()) -> None:
        """Holds the headers against all that a model will ask for, before anything is allocated.

        Args:
            shapes: FQN -> shape of every parameter and persistent buffer.
            whole: fused FQNs that must not be put together from per-expert keys (see `other_layouts`).

        Raises:
            CheckpointError: a missing, extra or wrongly shaped tensor, a dtype other than BF16, FP16 and FP32,
                an expert out of range, or halves of an odd number of rows; by key, with both shapes.
        """
        reads = Reads()
        for parts in self._matcher.parts(shapes, whole).values():
            for part in parts:
                reads.add(part)
        self._matcher.leftovers(reads)

    def tensors_for(
        self, shapes: Shapes, *, whole: frozenset[str] = frozenset()
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields (FQN, FP32 tensor on the CPU) in the order of `shapes`, one unit's for instance.

        All of `shapes` are checked by this call, before the first is read; only one tensor exists at a time.

        Args:
            shapes: FQN -> shape.
            whole: as in `check`.

        Raises:
            CheckpointError: as `check`, but for keys that `shapes` does not ask for; those are `finish`'s.
        """
        return self._values(shapes, self._matcher.parts(shapes, whole))

    def finish(self) -> ImportReport:
        """What became of every key; call it when all units are loaded.

        Raises:
            CheckpointError: a key that was neither read nor has a reason to be dropped.
        """
        dropped = self._matcher.leftovers(self._reads)
        return ImportReport(
            str(self.folder), self._stored.files, dict(self._loaded), dropped, dict(self._stored.unused)
        )

    def _values(
        self, shapes: Shapes, planned: Mapping[str, tuple[Part, ...]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for fqn, parts in planned.items():
            out = torch.empty(tuple(shapes[fqn]), dtype=torch.float32)
            for part in parts:
                _fill(out if part.place is None else piece_of(out, part.place), part)
                self._reads.add(part)
            self._loaded[fqn] = tuple(part.stored.key for part in parts)
            yield fqn, out
            del out  # before the next is allocated


def _fill(out: torch.Tensor, part: Part) -> None:
    """Copies one part into FP32, some rows at a time where it is large; the upcast is exact."""
    stored = part.stored
    if part.cut is not None:
        out.copy_(stored.read(part.cut.expert, part.cut.rows(stored.shape[1])))
        return
    if not out.numel() or not out.dim():
        out.copy_(stored.read())
        return
    rows = max(1, _CHUNK_BYTES // (4 * out[0].numel()))
    for start in range(0, len(out), rows):
        out[start : start + rows].copy_(stored.read(slice(start, start + rows)))
