"""The token cache on disk: its layout, when it still holds, and how it opens as memory maps.

One folder holds one prepared corpus: per source and split a file of token ids and one of document offsets,
for validation also the bytes of each token, and manifest.json, which names every source file with its sha256.
Files are compared cheaply first (size and times) and by sha256 where these differ, both the sources and the
cache's own. May import `quaver.errors`, numpy, the sources' and the tokeniser's module.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from quaver.data.sources import Source

VERSION = 1
MANIFEST = "manifest.json"
SPLITS = ("train", "validation")


@dataclass(frozen=True)
class FileStamp:
    """What a file was when it was read; the times only spare the hashing."""

    size: int
    mtime_ns: int
    ctime_ns: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> FileStamp:
        """Reads and hashes the file."""
        with path.open("rb") as data:
            status = os.fstat(data.fileno())
            digest = hashlib.file_digest(data, "sha256").hexdigest()
        return cls(status.st_size, status.st_mtime_ns, status.st_ctime_ns, digest)

    def times_hold(self, path: Path) -> bool:
        """True where size and both times are as recorded (a forged mtime leaves a new ctime)."""
        status = path.stat()
        return (status.st_size, status.st_mtime_ns, status.st_ctime_ns) == (
            self.size,
            self.mtime_ns,
            self.ctime_ns,
        )


@dataclass(frozen=True)
class TokenStream:
    """The documents of one source and split, one after the other, each followed by the end-of-document id.

    Args:
        name, weight: the source's.
        tokens: uint16 or uint32 [tokens], memory-mapped.
        offsets: int64 [documents + 1], where each document starts, and the end.
        byte_counts: uint32 [tokens], UTF-8 bytes of text that each token stands for; None in the train split.
    """

    name: str
    weight: float
    tokens: npt.NDArray[np.unsignedinteger[Any]]
    offsets: npt.NDArray[np.int64]
    byte_counts: npt.NDArray[np.uint32] | None

    def windows(self, seq_len: int) -> int:
        """How many windows of `seq_len` + 1 tokens start on the grid of `seq_len`."""
        return max(0, (len(self.tokens) - 1) // seq_len)


@dataclass(frozen=True)
class TokenCache:
    """One split of a prepared corpus; `digest` stands for the whole corpus (both splits and tokeniser)."""

    split: str
    streams: tuple[TokenStream, ...]
    digest: str
    vocab_size: int
    eos_id: int

    @property
    def n_tokens(self) -> int:
        """Tokens of all sources."""
        return sum(len(stream.tokens) for stream in self.streams)


@dataclass(frozen=True)
class Fault:
    """Why a cache cannot be used; `damaged` tells a broken cache from one whose sources changed."""

    reason: str
    damaged: bool


def stream_files(index: int, split: str) -> dict[str, str]:
    """File names of source number `index` in a split, by content."""
    names = {"tokens": f"{split}-{index}.bin", "offsets": f"{split}-{index}.offsets.bin"}
    if split == "validation":
        names["byte_counts"] = f"{split}-{index}.bytes.bin"
    return names


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Writes manifest.json so that it is there whole or not at all."""
    temporary = folder / f"{MANIFEST}.{os.getpid()}.tmp"
    with temporary.open("w", encoding="utf-8") as text:
        json.dump(manifest, text, indent=1)  # in ASCII: a file's name need not be UTF-8
        text.flush()
        os.fsync(text.fileno())
    temporary.replace(folder / MANIFEST)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Reads manifest.json. Raises OSError or ValueError where it is missing or broken."""
    manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    if not isinstance(manifest, dict):
        raise ValueError("manifest.json is not an object")
    return manifest


def find_fault(folder: Path, identity: dict[str, Any], sources: tuple[Source, ...]) -> Fault | None:
    """Compares a cache with what it should hold; None where it can be used as it is.

    Where only the times of a file changed, the manifest takes the new ones, so that it is hashed once.
    """
    if not folder.is_dir():
        return Fault("there is none yet", damaged=False)
    try:
        manifest = read_manifest(folder)
        if manifest["identity"] != identity:
            return Fault("it was made by another version or with other settings", damaged=False)
        fault = _source_fault(manifest["sources"], sources) or _own_fault(folder, manifest["cache_files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        return Fault(f"its manifest cannot be read ({type(error).__name__}: {error})", damaged=True)
    if fault is None and manifest != read_manifest(folder):
        write_manifest(folder, manifest)
    return fault


def _source_fault(recorded: list[dict[str, Any]], sources: tuple[Source, ...]) -> Fault | None:
    for entry, source in zip(recorded, sources, strict=True):
        files = entry["files"] + [left for left in entry["left_out"] if "sha256" in left]
        by_name = {file["path"]: file for file in files}
        if sorted(by_name) != [file.relative for file in source.files]:
            return Fault(f"files came or went in {source.root}", damaged=False)
        unread = [left for left in entry["left_out"] if "sha256" not in left]
        if unread != [asdict(left) for left in source.left_out]:
            return Fault(f"what is left out of {source.root} changed", damaged=False)
        for file in source.files:
            if not _holds(by_name[file.relative], file.path):
                return Fault(f"{file.path} changed", damaged=False)
    return None


def _own_fault(folder: Path, recorded: dict[str, dict[str, Any]]) -> Fault | None:
    for name, entry in recorded.items():
        path = folder / name
        if not path.is_file():
            return Fault(f"its file {name} is missing", damaged=True)
        if path.stat().st_size != entry["size"]:
            return Fault(
                f"its file {name} has {path.stat().st_size} bytes instead of {entry['size']}", damaged=True
            )
        if not _holds(entry, path):
            return Fault(f"the content of its file {name} changed", damaged=True)
    return None


def _holds(entry: dict[str, Any], path: Path) -> bool:
    """True where the file is as recorded in `entry`, whose times are brought up to date."""
    stamp = FileStamp(entry["size"], entry["mtime_ns"], entry["ctime_ns"], entry["sha256"])
    if stamp.times_hold(path):
        return True
    now = FileStamp.of(path)
    entry.update(asdict(now))
    return now.sha256 == stamp.sha256


def content_digest(manifest: dict[str, Any]) -> str:
    """sha256 over what a run trains on: source names, ids, boundaries, tokeniser; not times or places."""
    content = {
        "version": VERSION,
        "sources": [source["name"] for source in manifest["sources"]],
        "tokenizer": manifest["tokenizer"]["digest"],
        "files": {name: entry["sha256"] for name, entry in manifest["cache_files"].items()},
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def open_caches(folder: Path, manifest: dict[str, Any], sources: tuple[Source, ...]) -> Iterator[TokenCache]:
    """Yields the train and the validation cache, memory-mapped, of a folder found without fault."""
    for split in SPLITS:
        streams = []
        for index, source in enumerate(sources):
            names = stream_files(index, split)
            counts = names.get("byte_counts")
            streams.append(
                TokenStream(
                    name=source.name,
                    weight=source.weight,
                    tokens=_map(folder / names["tokens"], np.dtype(manifest["token_dtype"])),
                    offsets=_map(folder / names["offsets"], np.dtype(np.int64)),
                    byte_counts=None if counts is None else _map(folder / counts, np.dtype(np.uint32)),
                )
            )
        tokenizer = manifest["tokenizer"]
        yield TokenCache(
            split, tuple(streams), manifest["digest"], tokenizer["vocab_size"], tokenizer["eos_id"]
        )


def _map(path: Path, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    if path.stat().st_size == 0:  # an empty file cannot be mapped
        return np.zeros(0, dtype=dtype)
    # asarray: a plain ndarray over the map; np.memmap's own slicing costs microseconds a window
    return np.asarray(np.memmap(path, dtype=dtype, mode="r"))
