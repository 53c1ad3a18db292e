"""index.json: where each tensor of a checkpoint lies, as data that can be checked.

Torch's own `.metadata` says the same, but as a pickle: reading one runs whatever its writer put into it. It is
written, so that torch's tools can open a checkpoint, and never read here. The index is held against the manifest
before any tensor is read: pieces lie inside listed files, and tile each tensor without gap or overlap.
May import: files, manifest, errors.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from quaver.checkpoint.files import cannot_start
from quaver.checkpoint.manifest import Manifest

INDEX = "index.json"
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
}
Count = Annotated[int, Field(ge=0)]


class Piece(BaseModel):
    """One rank's rows of a tensor, and the bytes of a file that hold them (as `torch.save` wrote them)."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    file: str
    start: Count
    length: Count
    offsets: list[Count]
    sizes: list[Count]


class StoredTensor(BaseModel):
    """A whole tensor: dtype, size, and its pieces in row order."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    dtype: str
    size: list[Count]
    pieces: list[Piece]


class Index(BaseModel):
    """Every tensor of a checkpoint by its key, "model.<fqn>" or "optim.<fqn>.<what>"."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    version: Literal[1]
    tensors: dict[str, StoredTensor]

    def to_bytes(self) -> bytes:
        """The file's bytes."""
        return json.dumps(self.model_dump(), separators=(",", ":")).encode()

    def to_metadata(self) -> Metadata:
        """What torch's planner wants to know; the storage part holds this module's `Piece`s."""
        tensors: dict[str, Any] = {}
        pieces: dict[MetadataIndex, Piece] = {}
        for key, stored in self.tensors.items():
            chunks = []
            for number, piece in enumerate(stored.pieces):
                chunks.append(ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes)))
                pieces[MetadataIndex(key, piece.offsets, number)] = piece
            properties = TensorProperties(dtype=DTYPES[stored.dtype])
            tensors[key] = TensorStorageMetadata(properties, torch.Size(stored.size), chunks)
        return Metadata(state_dict_metadata=tensors, storage_data=pieces)


def index_of(metadata: Metadata) -> Index:
    """The index of a checkpoint that was just written, from torch's description of it; empty pieces are left out."""
    tensors = {}
    for key, stored in metadata.state_dict_metadata.items():
        if not isinstance(stored, TensorStorageMetadata):
            raise TypeError(f"{key} is not a tensor; what is no tensor belongs into state.json")
        pieces = []
        for chunk in stored.chunks:
            if math.prod(chunk.sizes):
                place = metadata.storage_data[MetadataIndex(key, chunk.offsets)]
                pieces.append(
                    Piece(
                        file=place.relative_path,
                        start=place.offset,
                        length=place.length,
                        offsets=list(chunk.offsets),
                        sizes=list(chunk.sizes),
                    )
                )
        tensors[key] = StoredTensor(
            dtype=str(stored.properties.dtype).removeprefix("torch."),
            size=list(stored.size),
            pieces=sorted(pieces, key=lambda piece: piece.offsets),
        )
    return Index(version=1, tensors=tensors)


def read_index(folder: Path, manifest: Manifest) -> Index:
    """Reads and checks the index; nothing of the folder is run.

    Raises:
        CheckpointError: exit code 2; it is missing, malformed, or does not fit the manifest.
    """
    path = manifest.file(folder, INDEX)
    try:
        index = Index.model_validate(json.loads(path.read_bytes()))
    except (OSError, ValueError, RecursionError, ValidationError) as error:
        raise cannot_start("the checkpoint's index cannot be read", where=path, remedy=REMEDY) from error
    for key, stored in index.tensors.items():
        fault = _fault(stored, manifest)
        if fault is not None:
            raise cannot_start(
                f"the checkpoint's index is wrong: {fault}", where=f"{key} in {path}", remedy=REMEDY
            )
    return index


REMEDY = "start from another checkpoint"


def _fault(stored: StoredTensor, manifest: Manifest) -> str | None:
    """What is wrong with a tensor's description, or None. Pieces are whole rows: all sharding is on dimension 0."""
    if stored.dtype not in DTYPES:
        return f"unknown dtype {stored.dtype!r}"
    row = 0
    for piece in stored.pieces:
        file = manifest.files.get(piece.file)
        if file is None:
            return f"it lies in {piece.file!r}, which the manifest does not list"
        if piece.start + piece.length > file.size:
            return f"it lies beyond the end of {piece.file}"
        if len(piece.offsets) != len(stored.size) or len(piece.sizes) != len(stored.size):
            return "a piece has another number of dimensions"
        if stored.size:
            if piece.offsets != [row] + [0] * (len(stored.size) - 1) or piece.sizes[1:] != stored.size[1:]:
                return f"its rows from {row} on are missing, or are there twice"
            row += piece.sizes[0]
    if not stored.size and len(stored.pieces) != 1:
        return f"a single number has {len(stored.pieces)} pieces"
    if stored.size and 0 not in stored.size and row != stored.size[0]:
        return f"it has {row} of {stored.size[0]} rows"
    return None
