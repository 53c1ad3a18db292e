"""One weight file, safetensors or pytorch_model.bin: headers at once, values piece by piece, code never.

Imports torch, safetensors and this room's `files`.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open

from quaver.checkpoint.files import cannot_start

# the dtypes that are read, by the names of the safetensors format; their FP32 upcast is exact
READABLE = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_BIN_NAMES = {dtype: name for name, dtype in READABLE.items()}


class Shard(Protocol):
    """An open file."""

    def headers(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Key -> (shape, dtype by the name of the safetensors format)."""

    def get(self, key: str, index: tuple[int | slice, ...]) -> torch.Tensor:
        """The part of a tensor that `index` selects, all of it where it is empty."""


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file, not read yet.

    Attributes:
        key: its name in the file.
        file: the file's name, relative to the folder.
        shape: as the header says.
        dtype: by the name of the safetensors format (`BF16`, `I64`, `F8_E4M3`, ...).
    """

    key: str
    file: str
    shape: tuple[int, ...]
    dtype: str
    _shard: Shard

    def read(self, *index: int | slice) -> torch.Tensor:
        """The part of the tensor that `index` selects, in its own dtype; all of it without one."""
        try:
            return self._shard.get(self.key, index)
        except (SafetensorError, OSError, RuntimeError) as error:
            raise cannot_start(
                f"the tensor cannot be read: {error}", where=f"{self.key} in {self.file}"
            ) from error


class SafetensorsShard:
    """A safetensors file: its header is checked by the library, its values are mapped, not loaded."""

    def __init__(self, path: Path) -> None:
        try:
            self._file = safe_open(str(path), framework="pt", device="cpu")
        except (SafetensorError, OSError) as error:
            raise cannot_start(
                f"the file is no intact safetensors file: {error}", where=path, remedy="fetch it again"
            ) from error

    def headers(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """See `Shard`."""
        slices = {key: self._file.get_slice(key) for key in self._file.keys()}  # noqa: SIM118 (not a mapping)
        return {key: (tuple(part.get_shape()), str(part.get_dtype())) for key, part in slices.items()}

    def get(self, key: str, index: tuple[int | slice, ...]) -> torch.Tensor:
        """See `Shard`."""
        tensor: torch.Tensor = self._file.get_slice(key)[index] if index else self._file.get_tensor(key)
        return tensor


class BinShard:
    """A file of `torch.save`, read by torch's restricted loader: tensors only, no code."""

    def __init__(self, path: Path) -> None:
        try:
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except (pickle.UnpicklingError, RuntimeError, ValueError, OSError, EOFError) as error:
            raise cannot_start(
                f"the file cannot be read as tensors alone: {' '.join(str(error).split())[:300]}",
                where=path,
                remedy="convert the model to safetensors",
            ) from error
        if not isinstance(loaded, dict):
            raise cannot_start("the file holds no mapping from names to tensors", where=path)
        for key, value in loaded.items():
            plain = isinstance(value, torch.Tensor) and value.layout is torch.strided
            if not isinstance(key, str) or not plain:
                raise cannot_start(
                    f"a {type(value).__name__} stands where a dense tensor should", where=f"{key!r} in {path}"
                )
        self._tensors: dict[str, torch.Tensor] = loaded

    def headers(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """See `Shard`."""
        return {
            key: (tuple(tensor.shape), _BIN_NAMES.get(tensor.dtype, str(tensor.dtype)))
            for key, tensor in self._tensors.items()
        }

    def get(self, key: str, index: tuple[int | slice, ...]) -> torch.Tensor:
        """See `Shard`."""
        return self._tensors[key].detach()[index]
