"""Writing to the run's folder: what the system refuses is told by file and remedy, and ends the run.

May import: errors.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quaver.errors import RunFolderError


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Around the writing of one file: an OSError becomes a RunFolderError that names it."""
    try:
        yield
    except OSError as error:
        raise not_written(path, error) from error


def not_written(path: Path, error: OSError) -> RunFolderError:
    """What the system refused, by file and remedy."""
    return RunFolderError(
        f"the run's folder cannot be written: {error.strerror or error}",
        where=str(path),
        remedy="make room, or make it writable, and go on with --resume",
    )


def write_text(path: Path, text: str) -> None:
    """A whole file, written beside, flushed to disk and renamed, so that nothing ever finds half of it.

    Raises:
        RunFolderError: the system refused.
    """
    beside = path.with_name(path.name + ".part")
    with writing(path):
        with beside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)


def write_json(path: Path, document: Any) -> None:
    """One JSON document; as `write_text`."""
    write_text(path, json.dumps(document, indent=2, ensure_ascii=False) + "\n")


def flush(path: Path) -> None:
    """Sees to it that what was written to a file, if there is one, survives a power cut.

    Raises:
        RunFolderError: the system refused.
    """
    if not path.exists():
        return
    with writing(path):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
