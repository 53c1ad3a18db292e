"""When a run validates, and what it writes of it: losses, bits per byte, and how the model continues prompts.

May import: assembly, config, data, evaluate, events, metrics, progress.
"""

from __future__ import annotations

from quaver.assembly import Assembly
from quaver.config import RunConfig
from quaver.data import PreparedData, validation_batches
from quaver.training.evaluate import Validation, continuation, validate
from quaver.training.events import Observer
from quaver.training.metrics import MetricsWriter
from quaver.training.progress import Progress


class Validations:
    """The validations of one run: no step has two."""

    last: tuple[int, Validation] | None = None
    """The step of the newest one, and what it found."""

    def __init__(
        self,
        config: RunConfig,
        assembly: Assembly,
        data: PreparedData,
        progress: Progress,
        observer: Observer,
        metrics: MetricsWriter,
        *,
        rank: int,
        ranks: int,
    ) -> None:
        self.config = config
        self.assembly = assembly
        self.data = data
        self.progress = progress
        self.observer = observer
        self.metrics = metrics
        self.rank, self.ranks = rank, ranks

    def when_due(self, *, last_step: int) -> None:
        """Validates every `training.validate_every` steps, the last one excepted, which the end of the run brings.

        A checkpoint knows of it, so that a resumed run does not repeat it.
        """
        every, progress = self.config.training.validate_every, self.progress
        if not every or progress.step % every or progress.step >= last_step:
            return
        if progress.validated_step == progress.step:
            self.last = (progress.step, Validation(progress.val_loss, progress.val_bpb))
            return
        held = self.now()
        progress.validated_step = progress.step
        progress.val_loss, progress.val_bpb = held.loss, held.bits_per_byte

    def now(self) -> Validation:
        """Validates, unless this step was."""
        step = self.progress.step
        if self.last is not None and self.last[0] == step:
            return self.last[1]
        self.observer.on_stage("validating", 0, None)
        training = self.config.training
        batches = validation_batches(
            self.data.validation,
            seq_len=self.config.data.seq_len,
            batch_size=training.micro_batch_size,
            count=training.validation_batches,
        )
        result = validate(self.assembly.model, batches, rank=self.rank, ranks=self.ranks)
        self.last = (step, result)
        self.metrics.write({"step": step, "val_loss": result.loss, "val_bpb": result.bits_per_byte})
        samples = self._samples()
        if samples:
            self.metrics.write({"step": step, "samples": samples})
        self.observer.on_validation(step, result, samples)
        return result

    def _samples(self) -> list[dict[str, str]]:
        """How the model continues each prompt."""
        training = self.config.training
        return [
            {
                "prompt": prompt,
                "text": continuation(
                    self.assembly.model,
                    self.data.tokenizer,
                    prompt,
                    tokens=training.sample_tokens,
                    window=self.config.data.seq_len,
                    seed=self.config.seed,
                ),
            }
            for prompt in training.sample_prompts
            if training.sample_tokens
        ]
