"""`quaver report`. May import: report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Folders of runs.", show_default=False)],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="FILE",
            help="The page to write; by default report.html, in the run's folder where it is one run.",
        ),
    ] = None,
) -> None:
    """Write one self-contained HTML page over one or several runs.

    Loss, validation, gradient norm, learning rate and throughput, several runs overlaid.

    Example: quaver report runs/tiny-bf16 runs/tiny-mxfp8 --out compare.html
    """
    from quaver.report import render_report

    if out is None:
        out = runs[0] / "report.html" if len(runs) == 1 else Path("report.html")
    page = render_report(runs, out)
    typer.echo(page)
