"""Streams and errors: data goes to stdout, everything else to stderr; colours only on a terminal.

May import: errors. rich comes with typer's own help, torch must not come from here.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections.abc import Iterator
from typing import Any, TextIO

from rich import box
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from quaver.errors import QuaverError

PIPE_WIDTH = 400  # columns of a table that goes to a file or another program: nothing is folded there


def console_on(stream: TextIO) -> Console:
    """A rich console on a stream, looked up when it is needed: tests and pipes replace the streams."""
    console = Console(file=stream, highlight=False, soft_wrap=False)
    return console if console.is_terminal else Console(file=stream, highlight=False, width=PIPE_WIDTH)


def out() -> Console:
    """Data for the user."""
    return console_on(sys.stdout)


def err() -> Console:
    """Progress, warnings and errors."""
    return console_on(sys.stderr)


def printable(text: str, *, keep: str = "\n") -> str:
    """Escapes what would move a terminal's cursor or hide text; `keep` and printable characters stay.

    Generated and foreign text (samples, file names) goes through here: an escape sequence in it must be seen,
    not obeyed.
    """
    return "".join(c if c in keep or c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def show_error(error: QuaverError) -> None:
    """What, where and remedy: a panel on a terminal, plain lines elsewhere."""
    console = err()
    parts = [("where", error.where), ("remedy", error.remedy)]
    if not console.is_terminal:
        lines = [f"error: {error.what}", *(f"  {label}: {text}" for label, text in parts if text)]
        console.file.write(printable("\n".join(lines)) + "\n")
        return
    body = Text(printable(error.what))
    for label, text in parts:
        if text:
            body.append(f"\n{label:>6}  ", style="bold dim").append(printable(text))
    kind = type(error).__name__
    console.print(Panel(body, title=kind, title_align="left", border_style="red", expand=False))


def new_table(*columns: str) -> Table:
    """A table in the one look that all verbs share; long cells fold, nothing is cut off."""
    table = Table(box=box.SIMPLE_HEAD, header_style="dim", pad_edge=False, show_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def note(text: str) -> None:
    """One line on stderr."""
    sys.stderr.write(printable(text) + "\n")


def write_json(document: Any) -> None:
    """The one document on stdout; non-finite numbers have to be strings by now."""
    json.dump(document, sys.stdout, indent=2, ensure_ascii=False, allow_nan=False)
    sys.stdout.write("\n")


@contextlib.contextmanager
def stdout_kept_clean(wanted: bool) -> Iterator[None]:
    """While a document is being made, what any library prints goes to stderr."""
    if not wanted:
        yield
        return
    with contextlib.redirect_stdout(sys.stderr):
        yield


class WarningLines(logging.Handler):
    """Quaver's own warnings as one line each on stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        """Writes `warning: ...`."""
        note(f"{record.levelname.lower()}: {record.getMessage()}")


def show_warnings() -> None:
    """Routes the package's logger to stderr, once."""
    logger = logging.getLogger("quaver")
    if not any(isinstance(handler, WarningLines) for handler in logger.handlers):
        logger.addHandler(WarningLines(logging.WARNING))
