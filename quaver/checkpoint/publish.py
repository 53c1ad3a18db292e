"""What a save does to a run's checkpoints folder, in an order that a crash or a full disk at any point cannot harm.

    writing    step-00000100.tmp-5ee1c0de/   tensors and records, each file flushed
    manifest   ... read back and digested; the manifest is written last, then the folder is flushed
    rename     step-00000100/                in one step
    latest     its name, in a file that is replaced in one step
    prune      older checkpoints than the newest `keep` go

Runs on the first rank alone. May import: files, find, manifest, errors.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from quaver.checkpoint.files import flush_folder, not_written, reason_of, replace_durably, write_durably
from quaver.checkpoint.find import LATEST, saved_steps, step_name
from quaver.checkpoint.manifest import MANIFEST, Manifest, is_complete
from quaver.errors import CheckpointError

Phase = Literal["writing", "manifest", "rename", "latest", "prune", "done"]
_LEFTOVER = re.compile(r"(?P<home>step-\d{8,}|latest)\.(?P<kind>tmp|old)-[0-9a-f]{8}")


class SaveSteps:
    """The steps of a save in one checkpoints folder.

    Args:
        folder: the checkpoints folder.
        keep: newest checkpoints that are kept.
        tell_phase: told (step, phase) just before each phase begins.
        tell: told what is worth a line.
    """

    def __init__(
        self,
        folder: Path,
        keep: int,
        tell_phase: Callable[[int, Phase], None],
        tell: Callable[[str], None],
    ) -> None:
        self.folder = folder
        self.keep = keep
        self.tell_phase = tell_phase
        self.tell = tell
        self.protected: set[Path] = set()

    def clean(self) -> None:
        """Makes the folder, and cleans up what a crash left in it; CheckpointError where it cannot."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for path in sorted(self.folder.iterdir()):
                left = _LEFTOVER.fullmatch(path.name)
                if left is None:
                    continue
                home = path.with_name(left["home"])
                if left["kind"] == "old" and not home.exists():
                    path.rename(home)
                    self.tell(f"put {home.name} back, which a crash had left half replaced")
                    continue
                shutil.rmtree(path) if path.is_dir() else path.unlink()
                self.tell(f"removed {path.name}, left over from a save that did not finish")
        except OSError as error:
            raise not_written(self.folder, error) from error

    def start(self, step: int) -> Path:
        """Makes the folder that a save is written into."""
        partial = self.folder / f"{step_name(step)}.tmp-{_unique()}"
        self.tell_phase(step, "writing")
        try:
            partial.mkdir()
        except OSError as error:
            raise not_written(partial, error) from error
        return partial

    def written(self, partial: Path, step: int) -> list[str]:
        """The files that the ranks have written, which are to be digested next."""
        self.tell_phase(step, "manifest")
        try:
            return sorted(path.name for path in partial.iterdir())
        except OSError as error:
            raise not_written(partial, error) from error

    def publish(self, partial: Path, manifest: Manifest) -> Path:
        """From a folder whose files are written and digested to the newest checkpoint."""
        step, final = manifest.step, self.folder / step_name(manifest.step)
        try:
            write_durably(partial / MANIFEST, manifest.to_bytes())
            flush_folder(partial)
            self.tell_phase(step, "rename")
            replaced = self._set_aside(final)
            partial.rename(final)
            flush_folder(self.folder)
        except OSError as error:
            raise not_written(partial, error) from error
        try:
            self.tell_phase(step, "latest")
            replace_durably(self.folder / LATEST, f"{final.name}\n".encode())
            self.tell_phase(step, "prune")
            if replaced is not None:
                shutil.rmtree(replaced)
            self._prune(step)
        except OSError as error:
            raise CheckpointError(
                f"the checkpoint is complete, but not all that follows could be done: {reason_of(error)}",
                where=str(error.filename or self.folder),
                remedy="make room, or make the folder writable; --resume finds this checkpoint",
            ) from error
        self.tell_phase(step, "done")
        return final

    def drop(self, partial: Path) -> None:
        """Removes a save that failed, which also makes room."""
        try:
            shutil.rmtree(partial)
        except FileNotFoundError:
            return  # it failed after its rename
        except OSError as error:
            self.tell(f"{partial} could not be removed after a failed save: {reason_of(error)}")

    def _set_aside(self, final: Path) -> Path | None:
        """An older save of the same step gives way, but is there until the new one is."""
        if not os.path.lexists(final):
            return None
        aside = final.with_name(f"{final.name}.old-{_unique()}")
        final.rename(aside)
        return aside

    def _prune(self, step: int) -> None:
        """Deletes whole checkpoints older than the newest `keep`; broken ones are left for someone to look at."""
        older = [path for s, path in saved_steps(self.folder).items() if s < step and is_complete(path)]
        for path in older[self.keep - 1 :]:
            if path.resolve() not in self.protected:
                doomed = path.with_name(f"{path.name}.tmp-{_unique()}")
                path.rename(doomed)  # so that a crash on the way leaves nothing with a checkpoint's name
                shutil.rmtree(doomed)


def _unique() -> str:
    return os.urandom(4).hex()
