"""One writer to a run's folder: rank 0 holds `.lock` in it for as long as the run goes on.

The lock is the kernel's (flock), so it ends with its process however that dies, and a file that a killed run has left
locks nothing. Its text is for people and for the launcher: the pid and the machine of who holds it.
May import: distributed, run_folder, errors.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from quaver.distributed import on_rank_zero
from quaver.errors import ConfigError
from quaver.training.run_folder import RUNS

LOCK = ".lock"
_HOLDER = re.compile(r"(\d{1,19}) on (\S{1,255})\n")
_HOLDER_BYTES = 300  # more than any text that is written here


@contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Entered by every rank around all that writes to `folder`, which exists: rank 0 holds the lock meanwhile.

    The file is there while the lock is held, and is left behind only by a process that was killed.

    Raises:
        ConfigError: on every rank: another run writes to this folder, or the file cannot be made or locked.
    """
    held: list[int] = []  # the open file, on rank 0 alone
    on_rank_zero(lambda: held.append(_acquire(folder / LOCK)))
    try:
        yield
    finally:
        for handle in held:
            with suppress(OSError):  # the folder is gone or read-only: what stays of the file locks nothing
                (folder / LOCK).unlink()
            os.close(handle)


def folder_locked_by(
    pid: int, name: str, out: str | os.PathLike[str] | None = None, runs: Path = RUNS
) -> Path | None:
    """The folder (`out`, else one of runs/<name>*) whose lock names this process of this machine; None: no such."""
    candidates = [Path(out)] if out is not None else sorted(runs.glob(f"{glob.escape(name)}*"))
    return next((path for path in candidates if _holder(path / LOCK) == (pid, socket.gethostname())), None)


def _acquire(path: Path) -> int:
    """The open, locked file."""
    while True:
        try:
            # a link in a folder that somebody else has made is not followed
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise _refused(path, error) from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _still_there(path, handle):  # its last holder has removed it since it was opened
                os.close(handle)
                continue
            os.ftruncate(handle, 0)
            os.write(handle, f"{os.getpid()} on {socket.gethostname()}\n".encode())
        except OSError as error:
            os.close(handle)
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):  # the second: some network file systems
                raise _in_use(path) from error
            raise _refused(path, error) from error
        return handle


def _still_there(path: Path, handle: int) -> bool:
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(handle))
    except FileNotFoundError:
        return False


def _holder(path: Path) -> tuple[int, str] | None:
    """Pid and machine that the file names; None where there is no file, or it says something else."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    with os.fdopen(handle, "rb") as file:
        try:
            text = file.read(_HOLDER_BYTES).decode("ascii")
        except (OSError, UnicodeDecodeError):
            return None
    found = _HOLDER.fullmatch(text)
    return (int(found[1]), found[2]) if found else None


def _in_use(path: Path) -> ConfigError:
    holder = _holder(path)
    if holder is None:  # it holds the lock, and has not written its pid yet
        who, end = "another process", "end it"
    else:
        who, end = f"process {holder[0]} on {holder[1]}", f"end it (kill {holder[0]})"
    return ConfigError(
        f"{who} is writing to this run's folder",
        where=str(path),
        remedy=f"wait until that run has ended, or {end}, or name another folder with --out",
    )


def _refused(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"the run's folder cannot be locked: {error.strerror or error}",
        where=str(path),
        remedy="make it writable, or name a place on a file system with file locks with --out",
    )
