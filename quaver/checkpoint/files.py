"""Bytes that survive a power cut, and the two kinds of error that this room raises.

A file is on disk once its data and its folder's entry are both flushed; only then may anything point at it.
May import: errors.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from quaver.errors import CheckpointError

PLAIN_NAME = r"^[A-Za-z0-9_.-]{1,200}$"


def is_plain_name(name: str) -> bool:
    """True for a file name that stays in its folder: no separator, no way up."""
    return re.fullmatch(PLAIN_NAME, name) is not None and name not in (".", "..")


def write_durably(path: Path, data: bytes) -> None:
    """Writes a new file and flushes its data; the folder's entry is the caller's to flush."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace_durably(path: Path, data: bytes) -> None:
    """Replaces a file in one step: a reader sees the old bytes or the new ones, also after a crash."""
    beside = path.with_name(f"{path.name}.tmp-{os.urandom(4).hex()}")
    try:
        write_durably(beside, data)
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    flush_folder(path.parent)


def flush_folder(folder: Path) -> None:
    """Flushes a folder's entries."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def not_written(folder: Path, cause: BaseException) -> CheckpointError:
    """The error of a save that failed; names the path and the cause."""
    named = getattr(cause, "filename", None)
    untouched = "the checkpoints before this one are untouched"
    return CheckpointError(
        f"the checkpoint could not be written: {reason_of(cause)}",
        where=str(named if named is not None else folder),
        remedy=f"make room, or make the folder writable; {untouched}"
        if isinstance(cause, OSError)
        else untouched,
    )


def cannot_start(what: str, *, where: Path | str, remedy: str | None = None) -> CheckpointError:
    """The error of a checkpoint that no run can start from; exit code 2."""
    error = CheckpointError(what, where=str(where), remedy=remedy)
    error.exit_code = 2
    return error


def reason_of(cause: BaseException) -> str:
    """One line: what the operating system, or the exception, says."""
    if isinstance(cause, OSError) and cause.strerror:
        return cause.strerror
    text = " ".join(str(cause).split())
    return f"{type(cause).__name__}: {text}" if text else type(cause).__name__
