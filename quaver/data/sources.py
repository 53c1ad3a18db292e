"""Which files make up the corpus: the default one and the user's, each as a sorted list of files.

The default corpus is the source code of the Python standard library, which lies on every machine that runs
Quaver, so a first run downloads nothing. A user's source is a file or a folder; what a folder holds is never
dropped in silence: a file that Quaver cannot read is an error, what is left out is listed with its reason.
Lists names only; `documents` reads. May import `quaver.errors` and the standard library.
"""

from __future__ import annotations

import os
import stat
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from quaver.data.documents import USER_SUFFIXES, SourceFile
from quaver.data.paths import existing_path
from quaver.errors import ConfigError

if TYPE_CHECKING:
    from quaver.config import SourceConfig

DEFAULT_CORPUS = "python-stdlib"
_NOT_LIBRARY = frozenset({"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test"})


@dataclass(frozen=True)
class LeftOut:
    """A file or folder that is no part of the corpus, and why; stands in the manifest."""

    path: str
    reason: str


@dataclass(frozen=True)
class Source:
    """The files of one source, sorted by relative path.

    Args:
        name: what reports call it; unique in a run.
        weight: its share of the training sequences, relative to the other sources' weights.
        root: absolute path of the file or folder.
        key: the config key that named it, for errors.
        lenient: files that are not UTF-8 are left out and listed (default corpus) instead of being errors.
    """

    name: str
    weight: float
    root: Path
    key: str
    files: tuple[SourceFile, ...]
    left_out: tuple[LeftOut, ...]
    lenient: bool = False


def find_sources(configs: tuple[SourceConfig, ...]) -> tuple[Source, ...]:
    """Lists the files of every source of `data.sources`; none given means the default corpus.

    Raises:
        ConfigError: a path is missing, empty, no plain file or folder, has an unknown extension or a link
            that leaves its folder; two sources have one name.
    """
    if not configs:
        return (_standard_library(DEFAULT_CORPUS, 1.0, "data.sources (the default corpus)"),)
    sources: list[Source] = []
    for index, config in enumerate(configs):
        key = f"data.sources[{index}]"
        if config.path == DEFAULT_CORPUS:
            source = _standard_library(config.name or DEFAULT_CORPUS, config.weight, key)
        else:
            source = _user_source(config.path, config.name, config.weight, key)
        twin = next((other for other in sources if other.name == source.name), None)
        if twin is not None:
            raise ConfigError(
                f"two sources have the name {source.name!r}",
                where=f"{twin.key} and {key}",
                remedy=f"give {key}.name a name of its own",
            )
        sources.append(source)
    return tuple(sources)


def _standard_library(name: str, weight: float, key: str) -> Source:
    root = Path(sysconfig.get_path("stdlib")).resolve()
    files, left_out = [], []
    for folder, folders, names in os.walk(root, onerror=_raise_unreadable):
        folders[:] = sorted(set(folders) - _NOT_LIBRARY)
        for file_name in names:
            path = Path(folder, file_name)
            relative = path.relative_to(root).as_posix()
            if path.suffix != ".py":
                continue
            if path.is_symlink():  # Debian links sitecustomize.py to /etc
                left_out.append(LeftOut(relative, "a link"))
            elif relative.startswith(("_sysconfigdata", "config-")):
                left_out.append(LeftOut(relative, "written by the build of this machine's Python"))
            else:
                files.append(SourceFile(path, relative, key))
    if not files:
        raise ConfigError(
            "this Python has no standard library sources (.py files) to train on",
            where=f"{key}, {root}",
            remedy="name your own text files in data.sources",
        )
    return _sorted_source(name, weight, root, key, files, left_out, lenient=True)


def _raise_unreadable(error: OSError) -> NoReturn:
    raise ConfigError(
        f"the folder cannot be read: {error.strerror}",
        where=f"data.sources, {error.filename}",
        remedy="make it readable or give another path",
    ) from error


def _user_source(given: str, name: str | None, weight: float, key: str) -> Source:
    remedy = f"give a .txt, .jsonl or .parquet file, a folder of them, or {DEFAULT_CORPUS!r}"
    path, status = existing_path(given, f"{key}.path", remedy)
    if stat.S_ISDIR(status.st_mode):
        root = path.resolve()
        files, left_out = _walk(root, key)
        if not files:
            raise ConfigError(
                "the folder holds no .txt, .jsonl or .parquet file",
                where=f"{key}.path, {path}",
                remedy="put the text there or give another path",
            )
        return _sorted_source(name or root.name or "data", weight, root, key, files, left_out)
    file = SourceFile(path, path.name, key)
    _require_readable_kind(file)
    return _sorted_source(name or path.stem, weight, path, key, [file], [])


def _sorted_source(
    name: str,
    weight: float,
    root: Path,
    key: str,
    files: list[SourceFile],
    left_out: list[LeftOut],
    lenient: bool = False,
) -> Source:
    files = sorted(files, key=lambda file: file.relative)
    left_out = sorted(left_out, key=lambda entry: entry.path)
    return Source(name, weight, root, key, tuple(files), tuple(left_out), lenient)


def _walk(root: Path, key: str) -> tuple[list[SourceFile], list[LeftOut]]:
    files: list[SourceFile] = []
    left_out: list[LeftOut] = []
    for entry in _entries(root):
        path = Path(entry.path)
        relative = path.relative_to(root).as_posix()
        if entry.is_symlink():
            # What it points to is read where it lies; through the link it would count twice.
            left_out.append(LeftOut(relative, _inner_link(path, root, key)))
        elif entry.name.startswith("."):
            left_out.append(LeftOut(relative, "a hidden name"))
        elif not entry.is_dir():
            file = SourceFile(path, relative, key)
            _require_readable_kind(file)
            files.append(file)
    return files, left_out


def _entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    """Everything below `folder`, without entering links and hidden folders."""
    try:
        with os.scandir(folder) as scan:
            entries = sorted(scan, key=lambda entry: entry.name)
    except OSError as error:
        _raise_unreadable(error)
    for entry in entries:
        yield entry
        if entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."):
            yield from _entries(Path(entry.path))


def _inner_link(path: Path, root: Path, key: str) -> str:
    target = Path(os.path.realpath(path))
    if not target.is_relative_to(root):
        raise ConfigError(
            f"the link leaves its source's folder: it points to {target}",
            where=f"{key}, {path}",
            remedy="copy the file into the folder, or name its own path as a source",
        )
    return f"a link to {target.relative_to(root).as_posix()}"


def _require_readable_kind(file: SourceFile) -> None:
    where = f"{file.key}, {file.path}"
    if not stat.S_ISREG(file.path.stat().st_mode):
        raise ConfigError(
            "the path is neither a plain file nor a folder", where=where, remedy="give a file or a folder"
        )
    if file.path.suffix.lower() not in USER_SUFFIXES:
        raise ConfigError(
            f"the extension {file.path.suffix!r} is none of {', '.join(USER_SUFFIXES)}",
            where=where,
            remedy="convert the file, rename it, or take it out of the source",
        )
