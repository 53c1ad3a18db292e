"""Writing to the run's folder: what the system refuses is told by file and remedy, and ends the run.

May import: errors.
"""

from __future__ import annotations

import json
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


def write_json(path: Path, document: Any) -> None:
    """One JSON document, written beside and renamed, so that no reader sees half of it.

    Raises:
        RunFolderError: the system refused.
    """
    beside = path.with_name(path.name + ".part")
    with writing(path):
        beside.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        beside.replace(path)
