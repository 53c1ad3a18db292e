"""`quaver bench`. May import: bench, errors and this room; numbers and targets are in the bench room."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from quaver.cli.console import err, new_table, note, out, printable, stdout_kept_clean, write_json
from quaver.cli.options import JSON
from quaver.errors import QuaverError

if TYPE_CHECKING:
    from quaver.bench import BenchReport, Result

MARKS = {True: ("met", "green"), False: ("missed", "red"), None: ("", "dim")}
TERMINATED = 128 + signal.SIGTERM


def bench(
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Only figures whose name matches, as a glob: 'step.*'. May be given several times.",
            show_default=False,
        ),
    ] = None,
    pairs: Annotated[
        int, typer.Option(min=1, help="Rounds of each figure; its ratio is the median over them.")
    ] = 7,
    threads: Annotated[
        int, typer.Option(min=1, help="Threads of everything that is timed, at most one a core.")
    ] = 1,
    as_json: JSON = False,
) -> None:
    """Measure the speed table: ratios of things that run turn by turn in this process.

    A ratio is our time over the other's: below 1 is faster. Each is the median over all pairs, with the smallest
    and the largest beside it, and the target is the largest that is accepted. A missed target is marked and
    leaves the exit code 0: a busy machine misses more than a quiet one, and the load is part of the output.

    All of it takes about ten minutes. Peers (torchao) have to be installed; otherwise choose other
    figures.

    Example: quaver bench --only 'linear.*' --only quantise.mxfp8.both
    """
    with _sigterm_as_ctrl_c(), stdout_kept_clean(as_json):
        from quaver.bench import run_bench

        with _progress() as on_progress:
            report = run_bench(only or (), pairs=pairs, threads=threads, on_progress=on_progress)
    with _written():
        if as_json:
            write_json(report.to_json())
        else:
            _show(report)


@contextmanager
def _sigterm_as_ctrl_c() -> Iterator[None]:
    """SIGTERM goes the way of Ctrl-C, on which the folders with corpus and checkpoints are removed; ends with 143."""
    if threading.current_thread() is not threading.main_thread():
        yield  # a library's caller: signals are not ours
        return
    came = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal came
        if not came:  # a second one would cut the removing short
            came = True
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except KeyboardInterrupt:
        if not came:
            raise
        note("stopped")
        raise typer.Exit(TERMINATED) from None
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _written() -> Iterator[None]:
    """Around the output: a full disk behind it is told in one sentence, and ends with 3."""
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        with suppress(OSError):  # what is still in the buffer would fail once more at the end of the process
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise QuaverError(
            f"the figures were measured and could not be written: {error.strerror or error}",
            where="standard output",
            remedy="make room, or send the output elsewhere, and measure again",
        ) from None


@contextmanager
def _progress() -> Iterator[Any]:
    """One bar a group on a terminal; elsewhere a line when a group begins and one when it is done. Both on stderr."""
    if not err().is_terminal:
        started: dict[str, float] = {}

        def line(group: str, done: int, total: int) -> None:
            if group not in started:
                started[group] = time.monotonic()
                note(f"measuring {group}, {total} {'pair' if total == 1 else 'pairs'}")
            if done == total:
                note(f"{group}: done after {time.monotonic() - started[group]:.0f} s")

        yield line
        return
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=30), MofNCompleteColumn())
    with Progress(*columns, console=err()) as bars:
        tasks: dict[str, Any] = {}

        def bar(group: str, done: int, total: int) -> None:
            if group not in tasks:
                tasks[group] = bars.add_task(group, total=total)
            bars.update(tasks[group], completed=done)

        yield bar


def _show(report: BenchReport) -> None:
    from quaver.bench.machine import cores

    machine = report.machine
    threads = f"threads: {machine['threads']} of {cores()} cores"
    busy = f"load {machine['load_average_before']} before, {machine['load_average_after']} after"
    out().print(
        Text(f"{machine['cpu']} · {threads} · torch {machine['torch']} · {busy}", style="dim")
    )
    kernels = machine["kernels"]
    out().print(
        Text(
            f"features: {', '.join(machine['cpu_features']) or 'none known'} · "
            f"kernels: {kernels['path']} ({printable(kernels['reason'])})",
            style="dim",
        )
    )
    for detour in kernels.get("detours", ()):
        out().print(Text(f"detour: {printable(detour)}", style="yellow"))
    table = new_table("name", "ratio", "target", "", "min to max", "pairs", "what over what")
    for result in report.results:
        word, style = MARKS[result.met]
        table.add_row(
            result.name,
            Text(f"{result.ratio:.3f}", style="bold"),
            "" if result.target is None else f"{result.target:g}",
            Text(word, style=style),
            f"{result.min:.3f} to {result.max:.3f}",
            str(result.pairs),
            Text(result.what, style="dim"),
        )
    out().print(table)
    missed: list[Result] = [result for result in report.results if result.met is False]
    if missed:
        sys.stdout.flush()
        note(f"{len(missed)} of {len(report.results)} figures miss their target")
