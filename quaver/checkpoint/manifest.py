"""manifest.json: the last file of a checkpoint, by which all others are known to be whole.

It lists every file with its size and SHA-256, and carries a digest of itself, so that any changed byte anywhere is
found. A folder without one is a save that did not finish. Ranks share the hashing.
May import: background, files, ranks, errors.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from quaver.checkpoint.background import Pace
from quaver.checkpoint.files import PLAIN_NAME, cannot_start, is_plain_name, reason_of
from quaver.checkpoint.ranks import Ranks
from quaver.errors import CheckpointError

MANIFEST = "manifest.json"
REMEDY = "start from another checkpoint; this one was cut short or changed after it was written"


class FileEntry(BaseModel):
    """Size in bytes and SHA-256 of one file."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    size: Annotated[int, Field(ge=0)]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Manifest(BaseModel):
    """What a checkpoint is: its step, ranks and recipe, and all its files."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: Literal["quaver-checkpoint"] = "quaver-checkpoint"
    version: Literal[1] = 1
    step: Annotated[int, Field(ge=0)]
    world_size: Annotated[int, Field(ge=1)]
    recipe: str | None
    files: dict[Annotated[str, Field(pattern=PLAIN_NAME)], FileEntry]

    def to_bytes(self) -> bytes:
        """The one way to write this manifest, with its own digest."""
        document: dict[str, Any] = self.model_dump()
        document["digest"] = hashlib.sha256(_canonical(document)).hexdigest()
        return _canonical(document)

    def file(self, folder: Path, name: str) -> Path:
        """A listed file's path; CheckpointError with exit code 2 for one whose digest nobody vouches for."""
        if name not in self.files:
            raise cannot_start(f"the manifest does not list {name}", where=folder / MANIFEST, remedy=REMEDY)
        return folder / name


def _canonical(document: dict[str, Any]) -> bytes:
    return (json.dumps(document, indent=1, sort_keys=True) + "\n").encode()


def describe_files(folder: Path, names: Iterable[str], pace: Pace | None = None) -> dict[str, FileEntry]:
    """Reads the files back from the file system and digests them; OSError where one cannot be read."""
    if pace is not None:
        pace.begin()
    return {name: _digest(folder / name, pace) for name in names}


class _Paced(io.FileIO):
    """A file that is read with pauses."""

    pace: Pace | None = None

    def readinto(self, buffer: Any, /) -> int:
        """The next bytes."""
        if self.pace is not None:
            self.pace()
        return super().readinto(buffer)


def _digest(path: Path, pace: Pace | None = None) -> FileEntry:
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with _Paced(handle, "rb") as file:
        file.pace = pace
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(None, "not a regular file", str(path))
        return FileEntry(size=status.st_size, sha256=hashlib.file_digest(file, "sha256").hexdigest())


def read_manifest(folder: Path) -> Manifest:
    """The manifest, if it is one and unchanged; the files that it lists are not looked at.

    Raises:
        CheckpointError: exit code 2.
    """
    path = folder / MANIFEST
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise cannot_start(
            "there is no manifest: the save did not finish, or this is no checkpoint",
            where=folder,
            remedy=REMEDY,
        ) from error
    except OSError as error:
        raise cannot_start(f"the manifest cannot be read: {reason_of(error)}", where=path) from error
    try:
        document = json.loads(data)
        if not isinstance(document, dict):
            raise ValueError("not an object")
        version = document.get("version")
        if document.get("format") == "quaver-checkpoint" and version != 1:
            raise cannot_start(
                f"the checkpoint has format version {version!r}; this release reads version 1",
                where=path,
                remedy="use the release of Quaver that wrote it",
            )
        document.pop("digest", None)
        manifest = Manifest.model_validate(document)
    except (ValueError, RecursionError, ValidationError) as error:
        raise cannot_start("the manifest is damaged", where=path, remedy=REMEDY) from error
    if manifest.to_bytes() != data:
        raise cannot_start("the manifest does not have its own digest", where=path, remedy=REMEDY)
    odd = [name for name in manifest.files if not is_plain_name(name) or name == MANIFEST]
    if odd:
        raise cannot_start(
            f"the manifest lists {odd[0]!r}, which is no file of its folder", where=path, remedy=REMEDY
        )
    return manifest


def verify(folder: Path | str, ranks: Ranks | None = None) -> Manifest:
    """Holds every file against the manifest; with several ranks each reads its share, and all agree.

    Raises:
        CheckpointError: exit code 2; names each file that is missing or differs, and how.
    """
    folder, ranks = Path(folder), ranks or Ranks()
    manifest = ranks.first_does(lambda: read_manifest(folder))
    shares = ranks.all_do(lambda: _problems(folder, manifest, ranks.share(sorted(manifest.files))))
    problems = sorted(problem for share in shares for problem in share)
    if problems:
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        raise cannot_start("; ".join(problems[:3]) + more, where=folder, remedy=REMEDY)
    return manifest


def is_complete(folder: Path) -> bool:
    """True if the manifest is whole and every file has its size: a quick look, not a proof."""
    try:
        manifest = read_manifest(folder)
        return all((folder / name).stat().st_size == entry.size for name, entry in manifest.files.items())
    except (OSError, CheckpointError):
        return False


def _problems(folder: Path, manifest: Manifest, names: Iterable[str]) -> list[str]:
    problems = []
    for name in names:
        entry = manifest.files[name]
        try:
            status = (folder / name).lstat()
            if not stat.S_ISREG(status.st_mode):
                problems.append(f"{name} is not a regular file")
            elif status.st_size != entry.size:
                problems.append(f"{name} has {status.st_size} bytes instead of {entry.size}")
            elif _digest(folder / name) != entry:
                problems.append(f"{name} was changed (its SHA-256 differs)")
        except FileNotFoundError:
            problems.append(f"{name} is missing")
        except OSError as error:
            problems.append(f"{name} cannot be read: {reason_of(error)}")
    return problems
