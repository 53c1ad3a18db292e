"""The folder of compiled kernels: where it is, who may write it, its lock, and whether a file in it is good.

A library is code that is loaded into this process. It must be this user's own, as long as it was when its digest
was written beside it (the loader dies of one that was cut short), and hold every function that the sources define.
May import: Python's own library.
"""

from __future__ import annotations

import _ctypes
import ctypes
import fcntl
import hashlib
import os
import stat
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

CACHE = "QUAVER_CACHE"
"""Environment variable: the folder of everything that Quaver keeps between runs; ~/.cache/quaver by default."""

REMEDY = f"set {CACHE} to a folder that can be written"


class BuildError(Exception):
    """No library came of it.

    Args:
        why: what went wrong and where, in one line.
        remedy: what to do about it; None: a working compiler.
    """

    def __init__(self, why: str, remedy: str | None = None) -> None:
        super().__init__(why)
        self.remedy = remedy


def cache_folder() -> Path:
    """$QUAVER_CACHE/kernels, else ~/.cache/quaver/kernels.

    Raises:
        BuildError: the user has no home.
    """
    try:
        return Path(os.environ.get(CACHE) or "~/.cache/quaver").expanduser().absolute() / "kernels"
    except RuntimeError as error:
        raise BuildError(f"there is no place for the kernels' cache: {error}", REMEDY) from error


@contextmanager
def _told(folder: Path) -> Iterator[None]:
    """What the system refuses in `folder`, with the remedy of a cache."""
    try:
        yield
    except OSError as error:
        why = f"the kernels' cache {folder} cannot be used: {error.strerror or error}"
        raise BuildError(why, REMEDY) from error


def prepare(folder: Path) -> None:
    """Makes the folder, open to this user alone.

    Raises:
        BuildError: it cannot be made, or is not this user's own.
    """
    with _told(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_owner(folder)


@contextmanager
def locked(folder: Path, name: str) -> Iterator[None]:
    """Holds the lock of one library: ranks that start together wait here for the first.

    Raises:
        BuildError: the lock's file cannot be made or locked.
    """
    with _told(folder):
        lock = (folder / f"{name}.lock").open("w")
    with lock:
        with _told(folder):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def place_for_trial(folder: Path) -> Iterator[Path]:
    """A temporary folder that shows what `folder` would allow: in it if it exists, else in what it would be made in.

    Raises:
        BuildError: nothing can be made there, or `folder` is not this user's own.
    """
    above = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    if above == folder:
        prepare(folder)
    with _told(folder):
        temporary = tempfile.TemporaryDirectory(prefix=".quaver-trial-", dir=above)
    with temporary as name:
        yield Path(name)


def part_file(library: Path) -> Path:
    """An empty file beside the library, for the compiler to write.

    Raises:
        BuildError: it cannot be made.
    """
    with _told(library.parent):
        handle, name = tempfile.mkstemp(prefix=library.stem, suffix=".part", dir=library.parent)
        os.close(handle)
    return Path(name)


def keep(part: Path, library: Path) -> None:
    """Puts a library that was found good into its place, its digest first.

    Raises:
        BuildError: the system refused.
    """
    with _told(library.parent):
        part.chmod(0o700)
        _digest_file(library).write_bytes(_digest(part))
        part.replace(library)


def remove(library: Path) -> None:
    """Takes a library that is no good out of the cache, with its digest.

    Raises:
        BuildError: the system refused.
    """
    with _told(library.parent):
        for path in (library, _digest_file(library)):
            path.unlink(missing_ok=True)


def is_good(library: Path, functions: Iterable[str]) -> bool:
    """True if the library is there as it was compiled and can be loaded with all its functions.

    Raises:
        BuildError: it is there, but not this user's own.
    """
    with _told(library.parent):
        kept = _digest_file(library)
        if not (library.is_file() and kept.is_file() and kept.read_bytes() == _digest(library)):
            return False
    check_owner(library.parent)
    check_owner(library)
    return why_not_loadable(library, functions) is None


def why_not_loadable(library: Path, functions: Iterable[str]) -> str | None:
    """Why the file is no library with these functions; None if it is. Loads it, and lets it go again.

    One that stayed loaded would be found under its old name once the file has been made anew.
    """
    try:
        loaded = ctypes.CDLL(str(library))
    except OSError as error:
        return str(error)
    try:
        missing = [name for name in functions if not hasattr(loaded, name)]
    finally:
        _ctypes.dlclose(loaded._handle)
    return f"{library} has no function {missing[0]}" if missing else None


def check_owner(path: Path) -> None:
    """A library is code: it must be this user's, and nobody else may have been able to write it.

    Raises:
        BuildError: it is another user's, or others may write to it; or it cannot be looked at.
    """
    with _told(path):
        found = path.stat()
    elsewhere = f", or set {CACHE} to a folder of your own"
    if found.st_uid != os.getuid():
        why = f"{path} belongs to another user (uid {found.st_uid}): it is not loaded"
        raise BuildError(why, f"chown {os.getuid()} {path}{elsewhere}")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        why = f"others may write to {path} (mode {stat.S_IMODE(found.st_mode):o}): it is not loaded"
        raise BuildError(why, f"chmod go-w {path}{elsewhere}")


def _digest_file(library: Path) -> Path:
    return library.with_suffix(".sha256")


def _digest(path: Path) -> bytes:
    return hashlib.sha256(path.read_bytes()).hexdigest().encode()
