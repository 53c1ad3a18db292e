"""`quaver`: the verbs and their exit codes.

0 ok, also where SIGTERM ended a run before training; 2 config, plan or capability errors and wrong usage, nothing was
started; 3 the run failed, or an error that nobody foresaw (with its traceback); 130 stopped by a second Ctrl-C, or by
one before training; 143 a measurement that SIGTERM stopped. Verbs import what they need when they run, so that
`quaver --help` needs no torch.
May import: the verbs of this room.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from quaver.cli.bench import bench
from quaver.cli.console import note, show_error, show_warnings
from quaver.cli.doctor import doctor
from quaver.cli.export import export
from quaver.cli.launch import LAUNCHED, end_with_launcher, record_error
from quaver.cli.plan import plan
from quaver.cli.report import report
from quaver.cli.train import train
from quaver.errors import QuaverError
from quaver.quiet import drop_known_noise

UNFORESEEN = 3
STOPPED = 130


class Verbs(TyperGroup):
    """Turns the errors that are meant for users into lines on stderr and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        """Runs the verb."""
        drop_known_noise()
        show_warnings()
        try:
            return super().invoke(ctx)
        except QuaverError as error:
            if not record_error(error):
                show_error(error)
            raise typer.Exit(error.exit_code) from None
        except KeyboardInterrupt as stopped:
            note(f"stopped: {stopped}" if str(stopped) else "stopped")
            raise typer.Exit(STOPPED) from None


# Threads that wait for work sleep rather than spin: on a machine that does anything else besides, spinning made
# training ten times slower, and on an idle one it gains nothing. Read by OpenMP when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

app = typer.Typer(
    cls=Verbs,
    name="quaver",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"quaver {version('quaver')}")
        raise typer.Exit


@app.callback()
def quaver(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Train mixture-of-experts language models in eight bits (MXFP8, HiF8), and prove the numbers.

    Example: quaver train configs/tiny/mxfp8.yaml
    """


def _paragraphs(verb: Callable[..., Any]) -> str:
    """A verb's docstring with each paragraph on one line, for the terminal to wrap."""
    return re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.getdoc(verb) or "")


for _verb in (train, plan, report, export, bench, doctor):
    app.command(help=_paragraphs(_verb))(_verb)


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Entry point of `quaver` and `python -m quaver`; always ends in SystemExit.

    Args:
        argv: arguments without the program's name; None: those of the process.
    """
    if LAUNCHED in os.environ:
        end_with_launcher()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a character that the terminal's encoding lacks is escaped
            stream.reconfigure(errors="backslashreplace")
    try:
        app(args=None if argv is None else list(argv), prog_name="quaver")
    except Exception as error:
        if not record_error(error):
            traceback.print_exc()
        _leave(UNFORESEEN)
    except SystemExit as ended:
        _leave(ended.code)
    _leave(0)


def _leave(code: str | int | None) -> NoReturn:
    """Ends the process; at once with several ranks, since ranks that tear gloo down one by one can abort.

    A second Ctrl-C ends it at once too where Python would wait for a thread, such as that of a save in flight.
    """
    waits = any(t is not threading.main_thread() and not t.daemon for t in threading.enumerate())
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 or (code == STOPPED and waits):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1 if code else 0)
    sys.exit(code)
