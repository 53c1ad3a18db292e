"""When a run saves and what it starts from: the trainer's side of the checkpoint room.

May import: checkpoint, progress, run_folder, config, errors.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quaver.assembly import Assembly
from quaver.checkpoint import CheckpointManager, Found, Phase, TrainState, load, locate, meaning_of
from quaver.checkpoint.files import cannot_start
from quaver.config import RunConfig, dump_yaml, load_config
from quaver.config.dump import to_data
from quaver.data import Loader
from quaver.distributed import world_size
from quaver.errors import ConfigError, QuaverError
from quaver.training.disk import flush, write_text, writing
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
            architecture=meaning_of(self.assembly.hf_config),
            tokens_per_step=self.config.training.micro_batch_size
            * self.config.data.seq_len
            * self.config.gradient_accumulation_steps
            * world_size(),
            loader=self.loader,
            router_bias=self.assembly.router_bias,
        )

    def resume(self, found: Found | None) -> Progress:
        """Takes up `found`, the newest whole checkpoint of this run; None: a fresh start, and a word about it.

        Raises:
            CheckpointError: exit code 2; the run had another recipe, or the checkpoint does not fit (see `load`).
        """
        if found is None:
            self.on_message("no complete checkpoint to resume from: starting at step 0")
            return Progress()
        for path, reason in found.skipped:
            self.on_message(f"skipped {path.name}: {reason}")
        state = self.state(Progress())
        if found.manifest.recipe != state.recipe:
            raise cannot_start(
                f"the run was trained in {_recipe(found.manifest.recipe)}, this config says {_recipe(state.recipe)}",
                where=f"low_precision, {found.path}",
                remedy=f"resume it in its own recipe, or start another run with checkpoint.load_from={self.folder}",
            )
        loaded = load(found.path, state, verified=True)
        if loaded.config_digest != state.config_digest:
            self.on_message(f"the config given now holds: {self._changes()}")
        if not loaded.rng:
            self.on_message("another number of ranks: the random generators start anew")
        if loaded.tokens_per_step != state.tokens_per_step:
            self.on_message(self._other_batch(loaded.tokens_per_step, state.tokens_per_step))
        self.on_message(f"resuming from {found.path.name}")
        return Progress.from_json(loaded.progress)

    def _changes(self) -> str:
        """The keys in which the config differs from the one in the run's folder, with both values."""
        try:
            before = load_config(self.folder / "config.yaml", formats=self.config.low_precision.more_formats)
        except ConfigError as error:
            return f"it differs from the one that saved this checkpoint ({error.what})"
        found = changed_keys(before, self.config)
        more = f" and {len(found) - 6} more" if len(found) > 6 else ""
        return (", ".join(found[:6]) + more) or "it differs from the one that saved this checkpoint"

    def _other_batch(self, before: int, now: int) -> str:
        told = f"a step has {now} tokens now, and had {before}"
        steps = self.config.gradient_accumulation_steps * before
        if steps % now == 0:
            return f"{told}; gradient_accumulation_steps={steps // now} would keep its size"
        return f"{told}; no gradient_accumulation_steps keeps its size on this number of ranks"

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
        if options.load_rng and not loaded.rng:
            self.on_message(
                f"checkpoint.load_rng: {found.path.name} is of {loaded.world_size} ranks, so the random generators of "
                "these ranks start anew"
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
        """Ends a save in flight and lets go of its process groups; raises the error of that save."""
        if self.manager is not None:
            self.manager.close()

    def close_after(self, error: BaseException) -> None:
        """As `close`, behind an error that must stay the one that is told; a second Ctrl-C waits for nothing."""
        if self.manager is None:
            return
        if isinstance(error, KeyboardInterrupt):
            self.manager.abandon()
            return
        try:
            self.manager.close()
        except QuaverError as late:
            if late is not error:
                self.on_message(f"the save in flight failed too: {late.what}")

    def _log_phase(self, step: int, phase: Phase) -> None:
        if phase == "rename":  # a checkpoint must not outlive the lines of its steps
            flush(self.folder / "metrics.jsonl")
        line = json.dumps({"time": time.time(), "step": step, "phase": str(getattr(phase, "value", phase))})
        with writing(self.folder / LOG), (self.folder / LOG).open("a") as log:
            log.write(line + "\n")


def _recipe(name: str | None) -> str:
    return "high precision" if name is None else name


def changed_keys(before: RunConfig, now: RunConfig) -> list[str]:
    """"training.steps 6 -> 8" for each key that differs."""

    def flat(data: Any, path: str) -> dict[str, Any]:
        if not isinstance(data, dict):
            return {path: data}
        found: dict[str, Any] = {}
        for key, value in data.items():
            found |= flat(value, f"{path}.{key}" if path else str(key))
        return found

    old, new = flat(to_data(before), ""), flat(to_data(now), "")
    keys = [*old, *(key for key in new if key not in old)]
    return [f"{key} {old.get(key)} -> {new.get(key)}" for key in keys if old.get(key) != new.get(key)]


def cut_metrics(path: Path, progress: Progress, on_message: Callable[[str], None] = print) -> None:
    """Drops what was written after the checkpoint: steps beyond its step, validations that it had not made.

    `on_message` is told of steps before it whose lines are not there.
    """
    if not path.exists():
        if progress.step:
            on_message(f"{path} is not there: the lines of steps 1 to {progress.step} are lost")
        return
    kept = []
    steps = set()
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            break  # the half-written last line of a killed run
        limit = progress.step if "loss" in line else progress.validated_step
        if line["step"] <= limit:
            kept.append(text)
            steps |= {line["step"]} if "loss" in line else set()
    lost = sorted(set(range(1, progress.step + 1)) - steps)
    if lost:
        on_message(f"{path.name} lacks the lines of {len(lost)} steps, the first {lost[0]}, the last {lost[-1]}")
    write_text(path, "".join(line + "\n" for line in kept))
