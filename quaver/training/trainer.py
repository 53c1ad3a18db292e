"""The trainer: prepares, builds, repeats `train_step`, and writes all that a reader needs to a folder.

May import: all rooms below.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from quaver.assembly import Assembly, assemble
from quaver.backends.native import keep_freed_pages
from quaver.config import Override, RunConfig, load_config
from quaver.data import Loader, PreparedData, prepare_data
from quaver.distributed import (
    gather_rows,
    init_world,
    leave_world,
    local_ranks,
    on_rank_zero,
    rank,
    shard_mesh,
    world_size,
)
from quaver.errors import NonFiniteError, QuaverError
from quaver.low_precision import FormatExtension
from quaver.report import render_report
from quaver.training.checkpoints import RunCheckpoints, cut_metrics
from quaver.training.device import training_device
from quaver.training.disk import not_written, write_json
from quaver.training.events import REPORT, Observer, RunResult, RunStart, Silent
from quaver.training.interrupt import StopRequest
from quaver.training.metrics import MetricsWriter
from quaver.training.opening import Opening, opening, run_folder
from quaver.training.preflight import dry_run
from quaver.training.progress import Progress
from quaver.training.proof import Proof, sum_expert_tokens
from quaver.training.run_folder import environment, write_config, write_tokenizer
from quaver.training.step import StepResult, scheduled_lr, train_step
from quaver.training.validations import Validations


def train(
    path_or_config: str | os.PathLike[str] | RunConfig | dict[str, Any],
    overrides: str | Sequence[str] = (),
    *,
    name: str | None = None,
    out: str | os.PathLike[str] | None = None,
    resume: bool = False,
    observer: Observer | None = None,
    formats: Sequence[FormatExtension] = (),
) -> RunResult:
    """Trains one run to its end.

    Args:
        path_or_config: a YAML file, a mapping, or a parsed config.
        overrides: dotted keys, "optimizer.lr=1e-4"; one, or several.
        name: folder name under runs/, instead of the config's.
        out: a folder that must not exist yet (unless `resume`), instead of runs/<name>.
        resume: go on from the newest whole checkpoint of `out`, else of the newest runs/<name>*.
        observer: what is told while the run goes on.
        formats: formats beside the built-in ones that the config may name.

    Raises:
        ConfigError, PlanError, CapabilityError: before anything is trained.
        CheckpointError: exit code 2: there are checkpoints to resume from, and none is usable.
        NonFiniteError, LedgerError, CheckpointError: the run failed; its folder says how far it came.
    """
    overrides = [overrides] if isinstance(overrides, str) else [*overrides]
    if name is not None:
        overrides.append(Override(f"name={json.dumps(name)}", place="the argument name"))
    config = resolve(path_or_config, overrides, formats)
    return Trainer(config, observer or Silent(), formats).run(out, resume=resume)


def resolve(
    path_or_config: str | os.PathLike[str] | RunConfig | dict[str, Any],
    overrides: str | Sequence[str] = (),
    formats: Sequence[FormatExtension] = (),
) -> RunConfig:
    """A parsed config with its overrides applied."""
    return load_config(path_or_config, overrides, formats=[more.name for more in formats])


class Trainer:
    """One run: `run` prepares and trains; what it holds is there to be read while it goes on."""

    assembly: Assembly
    data: PreparedData
    loader: Loader
    folder: Path

    def __init__(
        self, config: RunConfig, observer: Observer, formats: Sequence[FormatExtension] = ()
    ) -> None:
        self.config = config
        self.formats = formats
        self.observer = observer
        self.device = torch.device("cpu")
        self.rank, self.ranks = 0, 1
        self.progress = Progress()
        self.started_at = 0  # step of the checkpoint that this process went on from

    def run(self, out: str | os.PathLike[str] | None = None, *, resume: bool = False) -> RunResult:
        """Prepares, builds and trains; the folder is made once nothing but training can fail."""
        self.device = training_device(self.config, self.formats)
        started = init_world(self.device.type)
        try:
            result = self._run(out, resume)
        except KeyboardInterrupt:
            raise  # at once: a save in flight may still be talking to other ranks
        except BaseException:
            self._leave(started)
            raise
        self._leave(started)
        return result

    @staticmethod
    def _leave(started: bool) -> None:
        if started:
            leave_world()

    def _run(self, out: str | os.PathLike[str] | None, resume: bool) -> RunResult:
        self.rank, self.ranks = rank(), world_size()
        if self.rank:
            self.observer = Silent()
        # preparing a corpus may take minutes: a wrong --out is told before that
        with opening(
            self.config, out, resume=resume, last_step=self._last_step(), tell=self.observer.on_message
        ) as opened:
            self._prepare(opened.config)
            # from the folder on, the first Ctrl-C leaves it complete
            with (
                StopRequest(self.observer.on_message) as stop,
                run_folder(opened, self.config, out) as self.folder,
            ):
                try:
                    result = self._train(stop, opened)
                except KeyboardInterrupt:  # the second Ctrl-C: nothing more is written
                    raise KeyboardInterrupt(f"{self.folder} is incomplete") from None
                except Exception:
                    self._after_failure("no report", self._write_report)
                    raise
                self._write_report()
        return result

    def _train(self, stop: StopRequest, opened: Opening) -> RunResult:
        self._build(opened.config)
        self.checkpoints = RunCheckpoints(
            self.config,
            self.folder,
            self.assembly,
            self.loader,
            self.data.tokenizer.digest,
            self.observer.on_message,
            resuming=opened.existing is not None,
        )
        try:
            result = self._start_and_loop(stop, opened)
        except BaseException as error:
            self.checkpoints.close_after(error)
            self.assembly.router_bias.close()
            raise
        self.assembly.router_bias.close()
        self.checkpoints.close()
        return result

    def _start_and_loop(self, stop: StopRequest, opened: Opening) -> RunResult:
        if opened.existing is not None:
            self.progress = self.checkpoints.resume(opened.found)
            on_rank_zero(
                lambda: cut_metrics(self.folder / "metrics.jsonl", self.progress, self.observer.on_message)
            )
        if self.progress.step == 0:
            self.checkpoints.start_from_other()
        elif self.progress.step >= self._last_step():
            self.observer.on_message(
                f"nothing to train: the checkpoint is of step {self.progress.step}, and the last is {self._last_step()}"
            )
        self.started_at = self.progress.step
        self.proof = Proof(self.assembly, self.started_at)
        # not before the checkpoint fits: what is told of a run must stay true if it does not
        if self.progress.step < self._last_step():
            on_rank_zero(self._describe)
        self._tell_start()
        metrics = MetricsWriter(
            self.folder / "metrics.jsonl" if self.rank == 0 else None,
            self.folder / "tensorboard" if self.config.training.tensorboard and self.rank == 0 else None,
        )
        self.validations = Validations(
            self.config,
            self.assembly,
            self.data,
            self.progress,
            self.observer,
            metrics,
            rank=self.rank,
            ranks=self.ranks,
        )
        try:
            return self._loop(metrics, stop)
        finally:
            metrics.close()

    def _after_failure(self, missing: str, write: Callable[[], None]) -> None:
        """Writes what tells of the way to a failure; what hinders that must not hide the failure itself."""
        try:
            write()
        except QuaverError as error:
            self.observer.on_message(f"{missing}: {error.what}")

    def _write_report(self) -> None:
        # a run that failed before its first line has nothing to report, and its own error is the one to be told
        if self.rank == 0 and (self.folder / "metrics.jsonl").exists():
            try:
                render_report([self.folder], self.folder / REPORT)
            except QuaverError as error:
                if isinstance(error.__cause__, OSError):  # a full disk is no mistake in the command
                    raise not_written(self.folder / REPORT, error.__cause__) from error
                raise

    def _prepare(self, config: RunConfig) -> None:
        planned = dry_run(config, self.ranks, local_ranks(), self.formats)
        if config.training.num_threads is not None:
            torch.set_num_threads(config.training.num_threads)
        self.data = prepare_data(
            config.data,
            seed=config.seed,
            vocab_size=planned.hf_config.vocab_size,
            progress=self.observer.on_stage,
        )
        self.loader = Loader(
            self.data.train,
            seq_len=config.data.seq_len,
            micro_batch_size=config.training.micro_batch_size,
            seed=config.seed,
            rank=self.rank,
            world_size=self.ranks,
        )

    def _build(self, config: RunConfig) -> None:
        keep_freed_pages()
        # same bits on each run of one machine; uninitialised memory is never read, so it is not filled
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        self.observer.on_stage("building the model", 0, None)
        mesh = shard_mesh(config.fsdp_config.dp_shard_size, self.device.type)
        self.assembly = assemble(config, mesh, self.device, self.formats)
        self.sites = self.assembly.sites()
        self.parameters = sum(p.numel() for p in self.assembly.model.parameters())

    def _describe(self) -> None:
        """What the folder says of the run: its config, its tokeniser, what was replaced, where it runs."""
        tokenizer = self.data.tokenizer
        write_config(self.folder, self.config)
        write_tokenizer(self.folder, tokenizer)
        write_json(self.folder / "replacement.json", self.assembly.replacements())
        write_json(
            self.folder / "environment.json",
            environment(
                self.config,
                self.device,
                ranks=self.ranks,
                parameters=self.parameters,
                tokenizer={"name": tokenizer.name, "digest": tokenizer.digest},
                frozen=self.assembly.frozen,
                replicated=sorted(self.assembly.replicated),
            ),
        )

    def _tell_start(self) -> None:
        config = self.config
        self.observer.on_start(
            RunStart(
                folder=self.folder,
                parameters=self.parameters,
                low_precision_sites=len(self.sites),
                replacements=self.assembly.replacements(),
                recipe=self.assembly.ledger.recipe,
                device=str(self.device),
                threads=torch.get_num_threads(),
                steps=self._last_step(),
                tokens_per_step=config.training.micro_batch_size
                * config.data.seq_len
                * config.gradient_accumulation_steps
                * self.ranks,
            )
        )

    def _last_step(self) -> int:
        training = self.config.training
        return min(training.steps, training.stop_after or training.steps)

    def _loop(self, metrics: MetricsWriter, stop: StopRequest) -> RunResult:
        last = self._last_step()
        progress = self.progress
        try:
            self.validations.when_due(last_step=last)
            while progress.step < last and not self._stop_requested(stop):
                result = self._one_step(metrics)
                if progress.step == self.started_at + 1:
                    self.proof.check(progress.step, result)
                self.validations.when_due(last_step=last)
                if progress.step < last:
                    self.checkpoints.after_step(progress)
            trained = progress.step > self.started_at or progress.step == 0
            if trained:
                self.checkpoints.at_end(progress)
            held = self.validations.now()
            self.proof.check(progress.step)
            sum_expert_tokens(self.assembly.ledger)
        except Exception:
            self._after_failure("no ledger", self._write_ledger)
            raise
        if trained:
            self._write_ledger()
        return RunResult(self.folder, progress.step, held.loss, interrupted=progress.step < last)

    def _stop_requested(self, stop: StopRequest) -> bool:
        """True on every rank as soon as one was asked to stop: all end after the same step."""
        return bool(gather_rows(torch.tensor([stop.requested])).any())

    def _one_step(self, metrics: MetricsWriter) -> StepResult:
        config, start = self.config, time.perf_counter()
        batches = [self.loader.next().to(self.device) for _ in range(config.gradient_accumulation_steps)]
        progress = self.progress
        lr = scheduled_lr(progress.updates, config.training.steps, config.optimizer)
        result = train_step(self.assembly, batches, lr=lr, clip_norm=config.optimizer.clip_norm)
        progress.count(result)
        tokens_per_s = result.tokens / (time.perf_counter() - start)
        metrics.write(
            {
                "step": progress.step,
                "loss": result.loss,
                "grad_norm": result.grad_norm,
                "lr": result.lr,
                "tokens": progress.tokens,
                "tokens_per_s": round(tokens_per_s, 1),
                "skipped": progress.skipped,
            }
        )
        self.observer.on_step(progress.step, result, tokens_per_s)
        if progress.skipped_in_a_row >= config.training.nonfinite_limit:
            raise NonFiniteError(
                f"{progress.skipped_in_a_row} steps in a row had a non-finite loss or gradient",
                where=f"step {progress.step}: loss {result.loss}, gradient norm {result.grad_norm}",
                remedy="lower optimizer.lr, lengthen the warm-up, or look at the data of these steps",
            )
        return result

    def _write_ledger(self) -> None:
        if self.rank == 0:
            self.proof.write(self.folder / "ledger.json", self.progress.step)
