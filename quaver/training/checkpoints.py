"""When a run saves and what it starts from: the trainer's side of the checkpoint room.

May import: checkpoint, progress, run_folder, config, errors.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path

from quaver.assembly import Assembly
from quaver.checkpoint import CheckpointManager, Phase, TrainState, load, locate
from quaver.config import RunConfig, dump_yaml
from quaver.data import Loader
from quaver.training.disk import writing
from quaver.training.progress import Progress

FOLDER, LOG = "checkpoints", "checkpoints.log"


class RunCheckpoints:
    """Saves every `checkpoint.every` steps, resumes, and starts from other runs.

    Args:
        config: the run's config.
        folder: the run's folder.
        assembly, loader: what is saved and loaded into.
        tokenizer_digest: a checkpoint of another tokeniser is refused.
        on_message: told what is worth a line.
        resuming: the folder is that of an earlier run.
    """

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        assembly: Assembly,
        loader: Loader,
        tokenizer_digest: str,
        on_message: Callable[[str], None],
        *,
        resuming: bool,
    ) -> None:
        self.config, self.folder = config, folder
        self.assembly, self.loader = assembly, loader
        self.tokenizer_digest = tokenizer_digest
        self.on_message = on_message
        options = config.checkpoint
        self.manager: CheckpointManager | None = None
        if options.every is not None or resuming:
            self.manager = CheckpointManager(
                folder / FOLDER,
                keep=options.keep,
                asynchronous=options.asynchronous,
                on_phase=self._log_phase,
                on_message=on_message,
            )

    def state(self, progress: Progress) -> TrainState:
        """Everything that a checkpoint holds."""
        low = self.config.low_precision
        return TrainState(
            model=self.assembly.model,
            optimizer=self.assembly.optimizer,
            progress=progress.to_json(),
            recipe=low.recipe_id if low.enabled else None,
            config_digest=hashlib.sha256(dump_yaml(self.config).encode()).hexdigest(),
            tokenizer_digest=self.tokenizer_digest,
            loader=self.loader,
            router_bias=self.assembly.router_bias,
        )

    def resume(self) -> Progress:
        """The newest whole checkpoint of this run, loaded; a fresh start, and a word about it, if there is none."""
        found = self.manager.find_latest() if self.manager is not None else None
        if found is None:
            self.on_message("no complete checkpoint to resume from: starting at step 0")
            return Progress()
        for path, reason in found.skipped:
            self.on_message(f"skipped {path.name}: {reason}")
        state = self.state(Progress())
        loaded = load(found.path, state, verified=True)
        if loaded.config_digest != state.config_digest:
            self.on_message(
                "the config differs from the one that saved this checkpoint; the one given now holds"
            )
        if not loaded.rng:
            self.on_message("another number of ranks: the random generators start anew")
        self.on_message(f"resuming from {found.path.name}")
        return Progress.from_json(loaded.progress)

    def start_from_other(self) -> None:
        """Masters, and with `load_optimizer` and `load_rng` the rest, from a run of any recipe; steps start at 0."""
        options = self.config.checkpoint
        if options.load_from is None:
            return
        found = locate(Path(options.load_from))
        for path, reason in found.skipped:
            self.on_message(f"skipped {path.name}: {reason}")
        loaded = load(
            found.path,
            self.state(Progress()),
            optimizer=options.load_optimizer,
            rng=options.load_rng,
            loader=False,
            verified=True,
        )
        self.on_message(
            f"started from {found.path}, step {loaded.step}, recipe {loaded.recipe or 'none (BF16)'}"
        )

    def after_step(self, progress: Progress) -> None:
        """Saves where it is due; raises the error of an asynchronous save that has ended."""
        if self.manager is None:
            return
        self.manager.poll()
        every = self.config.checkpoint.every
        if every is not None and progress.step % every == 0:
            self.manager.save(progress.step, self.state(progress))

    def at_end(self, progress: Progress) -> None:
        """Saves the last step where a run saves at all, and waits until it is on disk."""
        if self.manager is None:
            return
        if self.config.checkpoint.every is not None and progress.step:
            self.manager.save(progress.step, self.state(progress))
        self.manager.wait()

    def close(self) -> None:
        """Ends a save in flight and lets go of its process groups."""
        if self.manager is not None:
            self.manager.close()

    def _log_phase(self, step: int, phase: Phase) -> None:
        line = json.dumps({"time": time.time(), "step": step, "phase": str(getattr(phase, "value", phase))})
        with writing(self.folder / LOG), (self.folder / LOG).open("a") as log:
            log.write(line + "\n")


def cut_metrics(path: Path, progress: Progress) -> None:
    """Drops what was written after the checkpoint: steps beyond its step, validations that it had not made."""
    if not path.exists():
        return
    kept = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            break  # the half-written last line of a killed run
        limit = progress.step if "loss" in line else progress.validated_step
        if line["step"] <= limit:
            kept.append(text)
    beside = path.with_name(path.name + ".part")
    with writing(path):
        beside.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
        beside.replace(path)
