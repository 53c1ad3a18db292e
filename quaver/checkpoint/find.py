"""Which checkpoint a run starts from: the newest whose every byte is what it was.

May import: files, manifest, ranks, errors.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from quaver.checkpoint.files import cannot_start, reason_of
from quaver.checkpoint.manifest import MANIFEST, Manifest, verify
from quaver.checkpoint.ranks import Ranks
from quaver.errors import CheckpointError

LATEST = "latest"
CHECKPOINTS = "checkpoints"
_STEP = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class Found:
    """A checkpoint that was verified, and what was passed over on the way to it: (path, reason)."""

    path: Path
    manifest: Manifest
    skipped: tuple[tuple[Path, str], ...] = ()


def step_name(step: int) -> str:
    """The folder name of a step's checkpoint."""
    return f"step-{step:08d}"


def step_of(path: Path) -> int | None:
    """The step that a folder's name tells, None for other folders."""
    match = _STEP.fullmatch(path.name)
    return int(match[1]) if match and step_name(int(match[1])) == path.name else None


def saved_steps(folder: Path) -> dict[int, Path]:
    """Step -> folder of everything that is named like a checkpoint, newest first."""
    if not folder.is_dir():
        return {}
    steps = {step: path for path in folder.iterdir() if (step := step_of(path)) is not None}
    return dict(sorted(steps.items(), reverse=True))


def find_latest(folder: Path | str, ranks: Ranks | None = None) -> Found | None:
    """The newest checkpoint that is whole, by its digests; None if nothing was ever saved here.

    Saves that did not finish never had a checkpoint's name; they are told among `skipped`.

    Raises:
        CheckpointError: exit code 2: there are checkpoints (or a `latest`) and none is usable; says why.
    """
    folder, ranks = Path(folder), ranks or Ranks()
    steps, skipped = ranks.first_does(lambda: _look(folder))
    for step, path in steps.items():
        try:
            manifest = verify(path, ranks)
        except CheckpointError as error:
            skipped.append((path, error.what))
            continue
        if manifest.step != step:
            skipped.append((path, f"its manifest is that of step {manifest.step}"))
            continue
        return Found(path, manifest, tuple(skipped))
    if any(step_of(path) is not None or path.name == LATEST for path, _ in skipped):
        reasons = "; ".join(f"{path.name}: {reason}" for path, reason in skipped)
        raise cannot_start(
            f"no checkpoint is usable: {reasons}",
            where=folder,
            remedy="start a new run, or set checkpoint.load_from to a checkpoint that is whole",
        )
    return None


def _look(folder: Path) -> tuple[dict[int, Path], list[tuple[Path, str]]]:
    """Candidates, newest first, and what can be told without reading them."""
    try:
        steps = saved_steps(folder)
        unfinished = [*folder.glob("step-*.tmp-*"), *folder.glob("step-*.old-*")]
        skipped = [(path, "left over from a save that did not finish") for path in sorted(unfinished)]
        pointer = folder / LATEST
        if pointer.exists():
            name = pointer.read_text(encoding="utf-8", errors="replace").strip()
            if name not in [path.name for path in steps.values()]:
                skipped.append((pointer, f"it points to {name[:80]!r}, which is not there"))
    except OSError as error:
        raise cannot_start(f"the checkpoints cannot be read: {reason_of(error)}", where=folder) from error
    return steps, skipped


def locate(path: Path | str, ranks: Ranks | None = None) -> Found:
    """The checkpoint that `checkpoint.load_from` means: a checkpoint, a run, or a run's checkpoints folder.

    Raises:
        CheckpointError: exit code 2; nothing there, or nothing usable.
    """
    path, ranks = Path(path), ranks or Ranks()
    kind = ranks.first_does(lambda: _kind(path))
    if kind == "checkpoint":
        return Found(path, verify(path, ranks))
    found = find_latest(path / CHECKPOINTS if kind == "run" else path, ranks)
    if found is None:
        raise _nothing_saved(path)
    return found


def look_for(path: Path | str) -> None:
    """What `locate` can tell without reading tensors: CheckpointError, exit code 2, where nothing is there."""
    path = Path(path)
    if not path.exists():
        raise cannot_start("there is no such path", where=path, remedy="name a run, or one of its checkpoints")
    kind = _kind(path)
    if kind != "checkpoint" and not _look(path / CHECKPOINTS if kind == "run" else path)[0]:
        raise _nothing_saved(path)


def _nothing_saved(path: Path) -> CheckpointError:
    return cannot_start(
        "there is no checkpoint",
        where=path,
        remedy="name a run that saved one (checkpoint.every), or one of its checkpoints",
    )


def is_checkpoint(path: Path) -> bool:
    """True for the folder of one checkpoint, whole or not."""
    return (path / MANIFEST).is_file() or (step_of(path) is not None and path.is_dir())


def _kind(path: Path) -> str:
    if is_checkpoint(path):
        return "checkpoint"
    return "run" if (path / CHECKPOINTS).is_dir() else "folder"
