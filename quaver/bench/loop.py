"""What surrounds a step: the trainer's loop over the bare step, the loader, and an asynchronous save.

The trainer is the real one, in a real run folder. Between two of its steps its own model takes the step bare, with a
batch that was there before (two models, equal but for where their memory lies, differ by more than a loop costs), and
a loader of its own reads one. The run is BF16: the ledger of a low-precision run would count the bare steps as well.
May import: training, checkpoint, data, steps.
"""

from __future__ import annotations

import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from quaver.assembly import Assembly
from quaver.bench.comparison import Comparison, Group, OnRound
from quaver.bench.policies import run_config
from quaver.bench.sizes import Sizes
from quaver.bench.steps import built, one_batch, our_step, world
from quaver.bench.timing import Contestant, Turn, take_turns
from quaver.checkpoint import CheckpointManager, TrainState
from quaver.config import RunConfig
from quaver.data import Batch, Loader, prepare_data
from quaver.training import Silent, StepResult, Trainer

WARM = 2  # steps of the trainer before the first that counts
PLAIN_STEPS = 5  # steps without a save, in the mean


def write_corpus(folder: Path, sizes: Sizes) -> Path:
    """Text enough for the windows of some steps, whatever its words."""
    corpus = folder / "corpus"
    corpus.mkdir()
    line = "The eighth note is half as long as the quarter, and twice as long as the sixteenth.\n"
    for number in range(4):
        text = f"{number} " + line * (1 + 16 * sizes.batch * sizes.seq_len // len(line))
        (corpus / f"{number}.txt").write_text(text, encoding="utf-8")
    return corpus


def run_in(folder: Path, sizes: Sizes, steps: int, *, fmt: str = "mxfp8") -> RunConfig:
    """A whole run of the timed model in a folder of its own, which validates once at its end."""
    data = {
        "sources": [{"path": str(write_corpus(folder, sizes))}],
        "cache_dir": str(folder / "cache"),
        "validation_fraction": 0.2,
    }
    training = {"steps": steps, "validate_every": 0, "validation_batches": 1, "sample_tokens": 0}
    return run_config(fmt, sizes, data=data, training=training)


class BetweenSteps(Silent):
    """Times the trainer's loop from step to step, and lets the others take their turns in between.

    Ctrl-C and SIGTERM stay with whoever measures: a run would take them for the wish to end well after this step,
    and figures of fewer rounds would come out as if nothing had happened.
    """

    def __init__(self, others: Mapping[str, Contestant], on_round: OnRound) -> None:
        self.others = others
        self.on_round = on_round
        self.rounds: list[dict[str, float]] = []
        self._resumed: float | None = None
        self._handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def on_stage(self, stage: str, done: int, total: int | None) -> None:
        """The run has taken the signals over by the time that it builds its model: they are taken back."""
        if threading.current_thread() is not threading.main_thread():
            return  # no run takes signals over in another thread
        for number, handler in self._handlers.items():
            if handler is not None:  # one that C has set can neither be read nor set again
                signal.signal(number, handler)

    def on_step(self, step: int, result: StepResult, tokens_per_s: float) -> None:
        """A step of the trainer is done: the time since it went on, then the others' times."""
        ended = time.perf_counter()
        taken = {}
        for name, contestant in self.others.items():
            start = time.perf_counter()
            contestant()
            taken[name] = time.perf_counter() - start
        if step > WARM and self._resumed is not None:
            self.rounds.append({"trainer": ended - self._resumed, **taken})
            self.on_round(len(self.rounds))
        self._resumed = time.perf_counter()


def trainer_rounds(
    sizes: Sizes, needed: frozenset[str], pairs: int, on_round: OnRound
) -> list[dict[str, float]]:
    """Rounds of the real trainer, the bare step and the loader."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="quaver-bench-")))
        stack.enter_context(world())
        config = run_in(folder, sizes, WARM + pairs, fmt="bf16")
        loader = make_loader(config)
        batches = iter([loader.next() for _ in range(WARM + pairs)])

        def load() -> None:
            loader.next()

        def bare() -> None:
            our_step(trainer.assembly, next(batches))

        observer = BetweenSteps({"bare": bare, "loader": load}, on_round)
        trainer = Trainer(config, observer)
        try:
            result = trainer.run(folder / "run")
        except KeyboardInterrupt:  # its own words name a folder that nobody shall keep
            raise KeyboardInterrupt from None
        if result.interrupted:  # between taking the signals over and giving them back
            raise KeyboardInterrupt
        return observer.rounds


def make_loader(config: RunConfig) -> Loader:
    """The loader of a run on one process."""
    model: dict[str, Any] = dict(config.model.config_overrides) if config.model is not None else {}
    data = prepare_data(config.data, seed=config.seed, vocab_size=model["vocab_size"])
    return Loader(
        data.train,
        seq_len=config.data.seq_len,
        micro_batch_size=config.training.micro_batch_size,
        seed=config.seed,
    )


class Saving:
    """All steps from the start of an asynchronous save until it is complete."""

    def __init__(self, manager: CheckpointManager, assembly: Assembly, batch: Batch, loader: Loader) -> None:
        self.manager, self.assembly, self.batch, self.loader = manager, assembly, batch, loader
        self.step = 0

    def __call__(self) -> int:
        """The number of steps that it took."""
        self.step += 1
        self.manager.save(self.step, self._state())
        steps = 0
        while steps == 0 or self.manager.in_flight:
            our_step(self.assembly, self.batch)
            steps += 1
            self.manager.poll()
        return steps

    def _state(self) -> TrainState:
        return TrainState(
            model=self.assembly.model,
            optimizer=self.assembly.optimizer,
            progress={"step": self.step},
            recipe=self.assembly.config.low_precision.recipe_id,
            config_digest="",
            tokenizer_digest="",
            loader=self.loader,
            router_bias=self.assembly.router_bias,
        )


@contextmanager
def saving_contestants(sizes: Sizes) -> Iterator[tuple[Saving, Contestant]]:
    """Steps beside a save that is being written, and steps without one, of the same model."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="quaver-bench-")))
        stack.enter_context(world())
        loader, batch, assembly = make_loader(run_in(folder, sizes, 1)), one_batch(sizes), built("mxfp8", sizes)
        stack.callback(assembly.router_bias.close)
        manager = stack.enter_context(CheckpointManager(folder / "checkpoints", keep=1, asynchronous=True))

        def plain() -> int:
            for _ in range(PLAIN_STEPS):
                our_step(assembly, batch)
            return PLAIN_STEPS

        yield Saving(manager, assembly, batch, loader), plain


def saving_rounds(
    sizes: Sizes, needed: frozenset[str], pairs: int, on_round: OnRound
) -> list[dict[str, float]]:
    """Seconds a step beside a save and without one, and `lost`: what one save adds to all its steps together."""
    with saving_contestants(sizes) as (saving, plain):
        taken = take_turns({"saving": saving, "plain": plain}, pairs, on_round=on_round, leads_in=False)
    return [with_lost(one["saving"], one["plain"]) for one in taken]


def with_lost(saving: Turn, plain: Turn) -> dict[str, float]:
    """Seconds a step of both, and what one save adds to its steps: a short turn holds several saves."""
    steps = saving.units / saving.runs
    lost = (saving.per_unit - plain.per_unit) * steps
    return {"saving": saving.per_unit, "plain": plain.per_unit, "lost": lost}


def trainer_group() -> Group:
    """The loop's and the loader's share of a step."""
    trainer = "Trainer's loop (loader, metrics, stop check) over the bare step of the same BF16 model"
    loader = "Loader's next micro-batch over the step that it is for: its share of the critical path"
    return Group(
        "trainer",
        (
            Comparison("trainer.over_step", "trainer", "bare", 1.02, trainer),
            Comparison("loader.over_step", "loader", "bare", None, loader),
        ),
        trainer_rounds,
    )


def saving_group() -> Group:
    """What a save costs the steps that go on beside it."""
    saving = "Steps from the start of an asynchronous save until it is complete, over plain ones, in the mean"
    return Group(
        "checkpoint",
        (
            Comparison("checkpoint.stall", "saving", "plain", 1.05, saving),
            Comparison("checkpoint.lost", "lost", "plain", None, "What one save costs all its steps, in steps"),
        ),
        saving_rounds,
    )
