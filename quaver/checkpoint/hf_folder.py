"""Opens the weight files of a Hugging Face folder without trusting any of them.

A folder is untrusted data: nothing in it is imported or executed, no path leaves it (by `..`, absolute, or through
a symbolic link), and the index and the files' own headers must agree key by key. Only headers are read here;
values are read piece by piece when asked for. Imports this room's `files` and `hf_shards`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from quaver.checkpoint.files import cannot_start
from quaver.checkpoint.hf_shards import BinShard, SafetensorsShard, StoredTensor

_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>[0-9]{5})-of-(?P<total>[0-9]{5})\.safetensors")


@dataclass(frozen=True)
class StoredFolder:
    """What the weight files of a folder hold.

    Attributes:
        tensors: key -> tensor, over all files.
        files: the files that were opened.
        unused: other weight files of the folder -> why they are not read.
    """

    tensors: dict[str, StoredTensor]
    files: tuple[str, ...]
    unused: dict[str, str]


def open_folder(folder: Path) -> StoredFolder:
    """Reads the headers of a folder's weight files.

    Taken, in this order: `model.safetensors.index.json`; `model.safetensors`; all `*.safetensors`;
    `pytorch_model.bin.index.json`; `pytorch_model.bin` (tensors only, `weights_only=True`).

    Raises:
        CheckpointError: no such files; an unsafe path; a file that cannot be read; a key in two files; an index
            that says other than the files.
    """
    if not folder.is_dir():
        raise cannot_start(
            "there is no such folder", where=folder, remedy="give the folder of a Hugging Face model"
        )
    try:
        names = sorted(path.name for path in folder.iterdir())
    except OSError as error:
        raise cannot_start(f"the folder cannot be read: {error.strerror}", where=folder) from error
    for suffix, single, opener in (
        (".safetensors", "model.safetensors", SafetensorsShard),
        (".bin", "pytorch_model.bin", BinShard),
    ):
        index = f"{single}.index.json"
        loose = [name for name in names if name.endswith(".safetensors")] if suffix != ".bin" else []
        if index in names and single in names:
            raise cannot_start(
                f"{index} and {single} are two sets of weights",
                where=folder,
                remedy="remove the one that is not meant",
            )
        if index in names:
            weight_map = _read_index(folder, index)
            return _open(folder, names, sorted(set(weight_map.values())), opener, index, weight_map)
        if single in names:
            return _open(folder, names, [single], opener, None, None)
        if loose:
            _require_all_shards(folder, loose)
            return _open(folder, names, loose, opener, None, None)
    raise cannot_start(
        "the folder holds no model.safetensors, no index and no pytorch_model.bin",
        where=folder,
        remedy="give the folder of a Hugging Face model",
    )


def file_inside(folder: Path, name: str, named_by: str) -> Path:
    """The real path of the regular file `name` in `folder`; CheckpointError if it is not there or elsewhere."""
    where = f"{name!r}, named by {named_by}"
    pure = PurePosixPath(name)
    outside = "the path leads out of the model's folder"
    if not name or "\0" in name or "\\" in name or pure.is_absolute() or ".." in pure.parts:
        raise cannot_start(outside, where=where, remedy="name files of the folder itself")
    try:
        real = (folder / name).resolve(strict=True)
        home = folder.resolve(strict=True)
    except (OSError, RuntimeError) as error:
        raise cannot_start(
            f"the file is not there: {error}", where=where, remedy="fetch the whole model"
        ) from error
    if not real.is_relative_to(home):
        raise cannot_start(
            f"{outside}, through a symbolic link",
            where=where,
            remedy="copy the files into one folder (cp -rL, or a download into a local folder)",
        )
    if not real.is_file():
        raise cannot_start("this is no regular file", where=where)
    return real


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """A JSON object of the folder; CheckpointError if it is none, or names a key twice."""
    path = file_inside(folder, name, str(folder))
    try:
        document = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_unique)
    except (OSError, ValueError, RecursionError) as error:
        raise cannot_start(f"the file cannot be read as JSON: {error}", where=path) from error
    if not isinstance(document, dict):
        raise cannot_start("the file does not hold a JSON object", where=path)
    return document


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document: dict[str, Any] = {}
    for name, value in pairs:
        if name in document:
            raise ValueError(f"the key {name!r} stands twice")
        document[name] = value
    return document


def _read_index(folder: Path, index: str) -> dict[str, str]:
    weight_map = read_json(folder, index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise cannot_start("the index has no weight_map from keys to files", where=str(folder / index))
    for key, name in weight_map.items():
        if not isinstance(name, str):
            raise cannot_start(
                f"the index names {name!r}, which is no file name", where=f"{key} in {folder / index}"
            )
    return weight_map


def _require_all_shards(folder: Path, names: list[str]) -> None:
    """Without an index, the file names alone say how many there should be."""
    series: dict[tuple[str, int], set[int]] = {}
    for name in names:
        found = _SHARD.fullmatch(name)
        if found is not None:
            series.setdefault((found["stem"], int(found["total"])), set()).add(int(found["number"]))
    for (stem, total), numbers in series.items():
        missing = next((number for number in range(1, total + 1) if number not in numbers), None)
        if missing is not None:
            raise cannot_start(
                f"a file is missing: {stem}-{missing:05}-of-{total:05}.safetensors",
                where=folder,
                remedy="fetch the whole model",
            )


def _open(
    folder: Path,
    names: list[str],
    files: list[str],
    opener: type[SafetensorsShard] | type[BinShard],
    index: str | None,
    weight_map: Mapping[str, str] | None,
) -> StoredFolder:
    tensors: dict[str, StoredTensor] = {}
    paths = {file: file_inside(folder, file, index or str(folder)) for file in files}
    for file, path in paths.items():
        shard = opener(path)
        for key, (shape, dtype) in shard.headers().items():
            if key in tensors:
                raise cannot_start(
                    f"the key stands in two files, {tensors[key].file} and {file}",
                    where=f"{key} in {folder}",
                    remedy="remove the file that does not belong to the model",
                )
            tensors[key] = StoredTensor(key, file, shape, dtype, shard)
    if index is not None and weight_map is not None:
        _compare(folder, index, weight_map, tensors)
    reason = f"not named by {index}" if index else f"{files[0]} is read"
    others = (name for name in names if name.endswith((".safetensors", ".bin", ".pt", ".pth", ".gguf")))
    unused = {name: reason for name in others if name not in files}
    return StoredFolder(tensors, tuple(files), unused)


def _compare(
    folder: Path, index: str, weight_map: Mapping[str, str], tensors: Mapping[str, StoredTensor]
) -> None:
    """The index and the files' headers must say the same of every key."""
    for key in (*tensors, *weight_map):
        named, held = weight_map.get(key), tensors[key].file if key in tensors else None
        if named != held:
            raise cannot_start(
                f"{held} holds a key that {index} places in {named or 'no file'}"
                if held is not None
                else f"{index} places a key in {named}, which does not hold it",
                where=f"{key} in {folder}",
                remedy="fetch the model again: index and files do not belong together",
            )
