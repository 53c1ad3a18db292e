"""From one file to its documents: .txt and .py (one a file), .jsonl (one a line), .parquet (one a row).

Files are untrusted: they are read as data only, and whatever cannot be read exactly (bytes that are not
UTF-8, a line that is not JSON, a row without text) is an error that names the file and the place in it. Text
is never normalised: newlines, byte order marks and blanks stay, so bytes per token can be counted exactly.
May import `quaver.errors`, the standard library and pyarrow.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quaver.errors import ConfigError


@dataclass(frozen=True)
class SourceFile:
    """One file of a source. `relative` is its name in the manifest; `key` is the config key that named it."""

    path: Path
    relative: str
    key: str


class NotUtf8Error(ConfigError):
    """Bytes that are not UTF-8; `offset` counts bytes from the start of the file (in parquet: of the row)."""

    def __init__(self, offset: int, where: str) -> None:
        self.offset = offset
        super().__init__(
            f"the text is not UTF-8: invalid bytes at byte offset {offset}",
            where=where,
            remedy="convert it, for instance with `iconv -f LATIN1 -t UTF-8`, or take it out of the source",
        )


def read_documents(file: SourceFile) -> Iterator[str]:
    """Yields the documents of `file` in order, empty ones too.

    Raises:
        NotUtf8Error: with the byte offset.
        ConfigError: the file cannot be read, or a line or row of it holds no text.
    """
    try:
        yield from READERS[file.path.suffix.lower()](file)
    except OSError as error:
        raise unreadable(file, error) from error


def unreadable(file: SourceFile, error: OSError) -> ConfigError:
    """The error of a file that the system will not hand out."""
    return ConfigError(
        f"the file cannot be read: {error.strerror or error}",
        where=_where(file),
        remedy="make it readable or take it out of the source",
    )


def _where(file: SourceFile, line: int | None = None) -> str:
    return f"{file.key}, {file.path}" + ("" if line is None else f":{line}")


def _decode(data: bytes, base: int, where: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise NotUtf8Error(base + error.start, where) from error


def _read_text(file: SourceFile) -> Iterator[str]:
    yield _decode(file.path.read_bytes(), 0, _where(file))


def _read_jsonl(file: SourceFile) -> Iterator[str]:
    offset = 0
    with file.path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            where = _where(file, number)
            text = _decode(line, offset, where)
            offset += len(line)
            if text.strip():  # JSON Lines allows blank lines, mostly the last one
                yield _text_of_json(text, where)


def _text_of_json(line: str, where: str) -> str:
    remedy = 'each line is a JSON object with a string field "text", or a JSON string'
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:  # ValueError: also a number of too many digits
        raise ConfigError(f"the line is not JSON: {error}", where=where, remedy=remedy) from error
    if isinstance(value, dict):
        if "text" not in value:
            fields = ", ".join(sorted(value)[:8]) or "none"
            raise ConfigError(
                f'the line has no field "text" (its fields: {fields})', where=where, remedy=remedy
            )
        value = value["text"]
    if not isinstance(value, str):
        raise ConfigError(
            f"the line's text is of type {type(value).__name__}, not a string", where=where, remedy=remedy
        )
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"the line's text holds a lone surrogate at character {error.start}, which no UTF-8 text can",
            where=where,
            remedy="write the whole \\ud83d\\ude00-style pair, or take the line out",
        ) from error
    return value


def _read_parquet(file: SourceFile) -> Iterator[str]:
    import pyarrow
    import pyarrow.parquet

    remedy = 'a parquet source has a column "text" of strings without nulls'
    try:
        # memory_map: a row group at a time is decoded; the file as a whole never lies in memory
        with pyarrow.parquet.ParquetFile(file.path, memory_map=True) as table:
            schema = table.schema_arrow
            if "text" not in schema.names:
                columns = ", ".join(schema.names[:8]) or "none"
                raise ConfigError(
                    f'the table has no column "text" (its columns: {columns})',
                    where=_where(file),
                    remedy=remedy,
                )
            kind = schema.field("text").type
            plain = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
            if not (
                pyarrow.types.is_string(plain)
                or pyarrow.types.is_large_string(plain)
                or pyarrow.types.is_string_view(plain)
            ):
                raise ConfigError(
                    f'the column "text" holds {kind}, not strings', where=_where(file), remedy=remedy
                )
            row = 0
            for batch in table.iter_batches(batch_size=1024, columns=["text"]):
                for value in batch.column(0).cast(pyarrow.large_binary()):
                    yield _text_of_row(value, f"{_where(file)}, row {row}", remedy)
                    row += 1
    except pyarrow.ArrowException as error:
        first_line = str(error).splitlines()[0]
        raise ConfigError(
            f"the file is not readable as parquet: {first_line}", where=_where(file), remedy=remedy
        ) from error


def _text_of_row(value: Any, where: str, remedy: str) -> str:
    # Arrow does not check that a file's strings are UTF-8, so the bytes are decoded here.
    data = value.as_py()
    if data is None:
        raise ConfigError("the row's text is null, not a string", where=where, remedy=remedy)
    return _decode(data, 0, where)


READERS: dict[str, Callable[[SourceFile], Iterator[str]]] = {
    ".txt": _read_text,
    ".py": _read_text,  # the default corpus alone; user sources list only USER_SUFFIXES
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
}
USER_SUFFIXES = (".txt", ".jsonl", ".parquet")
