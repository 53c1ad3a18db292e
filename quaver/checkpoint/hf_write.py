"""Writes tensors to safetensors files one after the other, a bounded number of bytes in memory at a time.

Files get their final names only when their number is known: `model.safetensors` for one, else
`model-00001-of-0000N.safetensors` with an index. May import: this room's `files`, safetensors.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from quaver.checkpoint.files import write_durably

INDEX = "model.safetensors.index.json"


class ShardWriter:
    """Collects tensors and writes a file whenever `max_shard_bytes` are full.

    Args:
        folder: an existing folder that holds no weights yet.
        max_shard_bytes: of tensors in a file; one tensor larger than that gets a file of its own.
    """

    def __init__(self, folder: Path, max_shard_bytes: int) -> None:
        self._folder, self._max = folder, max_shard_bytes
        self._mode = folder.stat().st_mode & 0o666  # what the user's umask leaves
        self._pending: dict[str, torch.Tensor] = {}
        self._pending_bytes = 0
        self._shards: list[list[str]] = []
        self.total_bytes = 0
        self.total_values = 0

    def add(self, key: str, tensor: torch.Tensor) -> None:
        """Takes over a contiguous tensor of its own memory."""
        size = tensor.numel() * tensor.element_size()
        if self._pending and self._pending_bytes + size > self._max:
            self._flush()
        self._pending[key] = tensor
        self._pending_bytes += size
        self.total_bytes += size
        self.total_values += tensor.numel()

    def finish(self) -> dict[str, str]:
        """Writes what is left, names the files, writes the index; returns key -> file, in the order written."""
        if self._pending:
            self._flush()
        count, weight_map = len(self._shards), {}
        for number, keys in enumerate(self._shards, start=1):
            name = "model.safetensors" if count == 1 else f"model-{number:05}-of-{count:05}.safetensors"
            self._part(number).rename(self._folder / name)
            weight_map.update(dict.fromkeys(keys, name))
        if count != 1:
            index = {
                "metadata": {"total_size": self.total_bytes, "total_parameters": self.total_values},
                "weight_map": dict(sorted(weight_map.items())),
            }
            write_durably(self._folder / INDEX, json_bytes(index))
        return weight_map

    def sizes(self) -> dict[str, int]:
        """File name -> bytes on disk, of everything in the folder."""
        return {path.name: path.stat().st_size for path in sorted(self._folder.iterdir())}

    def _part(self, number: int) -> Path:
        return self._folder / f"part-{number:05}.safetensors"

    def _flush(self) -> None:
        path = self._part(len(self._shards) + 1)
        save_file(self._pending, path, metadata={"format": "pt"})
        path.chmod(self._mode)  # the library gives files to their owner alone
        with path.open("rb") as file:
            os.fsync(file.fileno())
        self._shards.append(list(self._pending))
        self._pending, self._pending_bytes = {}, 0


def json_bytes(document: Any) -> bytes:
    """A JSON document as Hugging Face lays it out."""
    return (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode("utf-8")
