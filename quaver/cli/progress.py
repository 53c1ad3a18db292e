"""A run's progress on a terminal: stages, then one bar with a line above it for each validation.

May import: training (types only) and this room.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn
from rich.text import Text

from quaver.cli.console import printable
from quaver.cli.figures import View, replaced_lines, start_line

if TYPE_CHECKING:
    from quaver.training import RunStart, StepResult, Validation

SAMPLE_WIDTH = 100


class ProgressView(View):
    """Entered around a run; leaves the validation lines and the finished bar on the screen."""

    def __init__(self, console: Console, name: str) -> None:
        super().__init__(name)
        self.console = console
        self._preparing = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=30),
            TextColumn("{task.fields[done]}"),
            console=console,
            transient=True,
        )
        self._training = Progress(
            TextColumn("[bold]{task.description}[/]"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}", markup=False),
            console=console,
            expand=True,
        )
        self._stage: tuple[str, TaskID] | None = None
        self._bar: TaskID | None = None
        self._stopping = False

    def __enter__(self) -> ProgressView:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._preparing.stop()
        self._training.stop()

    def on_stage(self, stage: str, done: int, total: int | None) -> None:
        """A new bar when a stage begins; without a total it pulses. Later, the training bar says it."""
        if self._bar is not None:
            self._training.update(self._bar, description=self._doing(stage))
            return
        self._preparing.start()
        if self._stage is None or self._stage[0] != stage:
            if self._stage is not None:
                self._preparing.remove_task(self._stage[1])
            self._stage = (stage, self._preparing.add_task(stage, total=total, done=""))
        counted = f"{done:,}/{total:,}" if total else (f"{done:,}" if done else "")
        self._preparing.update(self._stage[1], completed=done, total=total, done=counted)

    def on_start(self, start: RunStart) -> None:
        """The start line, what was replaced, then the bar."""
        self._preparing.stop()
        self.tally.total_steps = start.steps
        line = Text(printable(self.name), style="bold").append(" · ", style="dim")
        self.console.print(line.append(printable(start_line(start)), style="not bold"))
        for hits in replaced_lines(start):
            self.console.print(Text(printable(hits), style="dim"))
        self._training.start()
        self._bar = self._training.add_task("training", total=start.steps, figures="")

    def on_step(self, step: int, result: StepResult, tokens_per_s: float) -> None:
        """Moves the bar; a skipped step gets a line of its own."""
        self.tally.add(result, tokens_per_s)
        if result.skipped:
            text = f"step {step:>5}   skipped: loss {result.loss}, gradient norm {result.grad_norm}"
            self.console.print(text, style="yellow")
        figures = (
            f"loss {result.loss:.4f}  lr {result.lr:.1e}  {tokens_per_s:,.0f} tokens/s  "
            f"{self.tally.time_left()} left"
        )
        self._training.update(
            self._task(), completed=step, figures=figures, description=self._doing("training")
        )

    def on_validation(self, step: int, validation: Validation, samples: list[dict[str, str]]) -> None:
        """A line above the bar, and what the model continues the prompts with."""
        self._training.update(self._task(), description=self._doing("training"))
        self.console.print(Text(self.tally.validation_line(step, validation), style="bold green"))
        for sample in samples:
            text = Text(printable(sample["prompt"], keep="\n\t"), style="bold")
            text.append(printable(sample["text"], keep="\n\t"), style="not bold")
            text.expand_tabs(4)
            width = min(SAMPLE_WIDTH, self.console.width)
            self.console.print(Panel(text, title="sample", title_align="left", style="dim", width=width))

    def on_message(self, message: str) -> None:
        """Shown by the bar's own thread: this runs in a signal handler, which may have cut into a print."""
        self._stopping = True
        if self._bar is not None:
            self._training.update(self._bar, description=message, figures="")

    def _doing(self, what: str) -> str:
        return "stopping" if self._stopping else what

    def _task(self) -> TaskID:
        assert self._bar is not None, "on_start comes first"
        return self._bar
