"""Reads a corpus and writes its token cache: scan and split, tokeniser, ids.

The corpus is read twice (three times with a BPE to train) instead of being held in memory: the split needs
every document's number before the first id is written. A file that changes between the passes is an error.
May import `quaver.errors`, numpy and the modules of this room below `prepare`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from quaver.data.cache import FileStamp, content_digest, stream_files
from quaver.data.documents import NotUtf8Error, SourceFile, read_documents, unreadable
from quaver.data.sources import Source
from quaver.data.split import choose_validation, document_number
from quaver.data.tokenizer import Tokenizer
from quaver.errors import ConfigError

Progress = Callable[[str, int, int | None], None]

_BATCH_CHARACTERS = 1 << 20  # enough documents at once for the tokeniser's threads, few enough for memory


@dataclass(frozen=True)
class ScannedFile:
    """A file as the scan found it; `left_out` is the reason why it gives no documents."""

    file: SourceFile
    stamp: FileStamp
    documents: int
    left_out: str | None


@dataclass(frozen=True)
class ScannedSource:
    """A source after the scan: its files, and which of its documents validate, bool [documents]."""

    source: Source
    files: tuple[ScannedFile, ...]
    validates: npt.NDArray[np.bool_]


def scan(sources: tuple[Source, ...], fraction: float, progress: Progress) -> tuple[ScannedSource, ...]:
    """Reads every document once, hashes files and splits the documents.

    Raises:
        ConfigError: a file is no text, a source holds none, or no document is left for validation.
    """
    total = sum(len(source.files) for source in sources)
    done = 0
    files: list[tuple[ScannedFile, ...]] = []
    numbers: list[npt.NDArray[np.uint64]] = []
    for source in sources:
        scanned: list[ScannedFile] = []
        source_numbers: list[npt.NDArray[np.uint64]] = []
        for file in source.files:
            stamp = _stamp(file)  # before the reading: a later change shows in the times
            found, reason = _scan_file(file, source.lenient)
            scanned.append(ScannedFile(file, stamp, len(found), reason))
            source_numbers.append(found)
            done += 1
            progress("reading the corpus", done, total)
        if not any(len(found) for found in source_numbers):
            raise ConfigError(
                "the source holds no text: every file is empty or left out",
                where=f"{source.key}, {source.root}",
                remedy="put text there or name another path",
            )
        files.append(tuple(scanned))
        numbers.append(np.concatenate(source_numbers))
    validates = choose_validation(numbers, fraction)
    return tuple(
        ScannedSource(source, source_files, mask)
        for source, source_files, mask in zip(sources, files, validates, strict=True)
    )


def _scan_file(file: SourceFile, lenient: bool) -> tuple[npt.NDArray[np.uint64], str | None]:
    """The numbers of the file's documents, or none and the reason why it is left out."""
    try:
        texts = (text for text in read_documents(file) if text)
        numbers = np.fromiter((document_number(text) for text in texts), dtype=np.uint64)
    except NotUtf8Error as error:
        if not lenient:
            raise
        return np.zeros(0, dtype=np.uint64), f"not UTF-8 at byte offset {error.offset}"
    return numbers, None if len(numbers) else "holds no text"


def _stamp(file: SourceFile) -> FileStamp:
    try:
        return FileStamp.of(file.path)
    except OSError as error:
        raise unreadable(file, error) from error


def _changed(file: SourceFile) -> ConfigError:
    return ConfigError(
        "the file changed while it was being read",
        where=f"{file.key}, {file.path}",
        remedy="start again once nothing writes to the corpus",
    )


def split_documents(scanned: ScannedSource) -> Iterator[tuple[bool, str]]:
    """Yields (validates, text) of each document that is not empty, in order."""
    position = 0
    for entry in scanned.files:
        if entry.left_out is not None:
            continue
        texts = (text for text in read_documents(entry.file) if text)
        count = 0
        for count, text in enumerate(texts, start=1):
            if count > entry.documents:
                break
            yield bool(scanned.validates[position]), text
            position += 1
        if count != entry.documents or not entry.stamp.times_hold(entry.file.path):
            raise _changed(entry.file)


def train_documents(scanned: Sequence[ScannedSource]) -> Iterator[str]:
    """The training documents of all sources: what a tokeniser may learn from."""
    for source in scanned:
        for validates, text in split_documents(source):
            if not validates:
                yield text


class _StreamWriter:
    """Writes one source's documents of one split, tokenised a batch at a time."""

    def __init__(
        self, folder: Path, index: int, split: str, tokenizer: Tokenizer, dtype: np.dtype[Any]
    ) -> None:
        self._tokenizer = tokenizer
        self._dtype = dtype
        self._files: dict[str, BinaryIO] = {
            kind: (folder / name).open("wb") for kind, name in stream_files(index, split).items()
        }
        self._pending: list[str] = []
        self._pending_characters = 0
        self.documents = 0
        self.tokens = 0
        self.bytes = 0

    def __enter__(self) -> _StreamWriter:
        np.zeros(1, dtype=np.int64).tofile(self._files["offsets"])
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.flush()
                for file in self._files.values():
                    file.flush()
                    os.fsync(file.fileno())
        finally:
            for file in self._files.values():
                file.close()

    def add(self, text: str) -> None:
        self._pending.append(text)
        self._pending_characters += len(text)
        if self._pending_characters >= _BATCH_CHARACTERS:
            self.flush()

    def flush(self) -> None:
        if not self._pending:
            return
        sizes = np.array([len(text.encode("utf-8")) for text in self._pending], dtype=np.int64)
        ids: list[npt.NDArray[np.uint32]]
        if "byte_counts" in self._files:
            counted = self._tokenizer.encode_counting_bytes(self._pending)
            ids = [tokens for tokens, _ in counted]
            # What the tokeniser dropped at a document's end counts with the eos, so that the sum is exact.
            rests = sizes - np.array([counts.sum(dtype=np.int64) for _, counts in counted])
            self._write("byte_counts", [counts for _, counts in counted], rests, np.dtype(np.uint32))
        else:
            ids = self._tokenizer.encode_documents(self._pending)
        eos = np.full(len(ids), self._tokenizer.eos_id, dtype=np.int64)
        self._write("tokens", ids, eos, self._dtype)
        ends = self.tokens + np.cumsum([len(tokens) + 1 for tokens in ids], dtype=np.int64)
        ends.tofile(self._files["offsets"])
        self.documents += len(ids)
        self.tokens = int(ends[-1])
        self.bytes += int(sizes.sum())
        self._pending = []
        self._pending_characters = 0

    def _write(
        self,
        kind: str,
        documents: Sequence[npt.NDArray[np.uint32]],
        closing: npt.NDArray[np.int64],
        dtype: np.dtype[Any],
    ) -> None:
        parts = [part for document, end in zip(documents, closing, strict=True) for part in (document, [end])]
        np.concatenate(parts).astype(dtype).tofile(self._files[kind])


def write_cache(
    folder: Path,
    scanned: Sequence[ScannedSource],
    tokenizer: Tokenizer,
    identity: dict[str, Any],
    progress: Progress,
) -> dict[str, Any]:
    """Tokenises all documents into `folder` and returns the manifest, which it does not write.

    A file that lies in the folder already (a trained tokenizer.json) becomes part of the cache.
    """
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
    total = sum(len(source.validates) for source in scanned)
    done = 0
    manifest: dict[str, Any] = {
        "identity": identity,
        "tokenizer": {
            "name": tokenizer.name,
            "digest": tokenizer.digest,
            "vocab_size": tokenizer.vocab_size,
            "eos_id": tokenizer.eos_id,
        },
        "token_dtype": dtype.name,
        "sources": [],
        "cache_files": {},
    }
    for index, source in enumerate(scanned):
        with (
            _StreamWriter(folder, index, "train", tokenizer, dtype) as train,
            _StreamWriter(folder, index, "validation", tokenizer, dtype) as validation,
        ):
            for validates, text in split_documents(source):
                (validation if validates else train).add(text)
                done += 1
                if done % 32 == 0 or done == total:
                    progress("tokenising", done, total)
        manifest["sources"].append(_source_entry(source, train, validation))
    for path in sorted(folder.iterdir()):
        manifest["cache_files"][path.name] = asdict(FileStamp.of(path))
    manifest["digest"] = content_digest(manifest)
    return manifest


def _source_entry(source: ScannedSource, train: _StreamWriter, validation: _StreamWriter) -> dict[str, Any]:
    files = [
        {"path": entry.file.relative, "documents": entry.documents, **asdict(entry.stamp)}
        for entry in source.files
        if entry.left_out is None
    ]
    left_out = [asdict(entry) for entry in source.source.left_out] + [
        {"path": entry.file.relative, "reason": entry.left_out, **asdict(entry.stamp)}
        for entry in source.files
        if entry.left_out is not None
    ]
    return {
        "name": source.source.name,
        "root": str(source.source.root),
        "documents": {"train": train.documents, "validation": validation.documents},
        "tokens": {"train": train.tokens, "validation": validation.tokens},
        "bytes": {"train": train.bytes, "validation": validation.bytes},
        "files": files,
        "left_out": left_out,
    }
