"""The page: charts and tables of some runs, rendered into one HTML file that refers to nothing outside
itself.

No script, no font, no image: text, CSS and SVG. A content policy forbids everything else, whatever the runs'
own text may hold; the templates escape all of it. May import: the other modules of this room, errors.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jinja2

from quaver.errors import ConfigError
from quaver.report import chart as charts
from quaver.report import tables
from quaver.report.run import GEMMS, Run, read_runs

SIGNATURE = (
    "<!doctype html>\n<!-- A Quaver run report -->\n"  # a file of another beginning is never overwritten
)
_COLOURS, _DASHES = 8, 4

Picker = Callable[[Any], float]
_TRAINING: dict[str, Picker] = {
    "loss": lambda line: line.loss,
    "grad_norm": lambda line: line.grad_norm,
    "lr": lambda line: line.lr,
    "tokens_per_s": lambda line: line.tokens_per_s,
}
_VALIDATION: dict[str, Picker] = {
    "val_loss": lambda line: line.val_loss,
    "val_bpb": lambda line: line.val_bpb,
}


def render_report(run_dirs: str | Path | Sequence[str | Path], out: str | Path) -> Path:
    """Writes one self-contained HTML page over one or several runs.

    Args:
        run_dirs: a run's folder, or several; colours follow their order, differences are against the first.
        out: the file to write; an earlier report there is replaced, any other file is not.

    Returns:
        The path of the page.

    Raises:
        ConfigError: a folder that is no readable run, a broken line or file, or `out` cannot be written.
    """
    folders = [run_dirs] if isinstance(run_dirs, str | Path) else list(run_dirs)
    runs = read_runs(folders)
    path = Path(out)
    _refuse_to_overwrite(path)
    html = _environment().get_template("page.html.j2").render(_context(runs))
    if not html.startswith(SIGNATURE):
        raise AssertionError("the page does not begin with its signature")
    _write(path, html)
    return path


def build_charts(runs: Sequence[Run]) -> list[charts.Chart]:
    """The charts of the page in its order; several runs get one more, of their difference from the first."""
    several = len(runs) > 1
    specs = [
        charts.Spec("loss", "Training loss", "nats per token", log=True, noisy=True, wide=several),
        charts.Spec("val_loss", "Validation loss", "nats per token", log=True, dots=True),
        charts.Spec("val_bpb", "Bits per byte", "of validation text", log=True, dots=True),
        charts.Spec("grad_norm", "Gradient norm", "L2, before clipping", log=True, noisy=True),
        charts.Spec("lr", "Learning rate", "of each step", zero=True),
        charts.Spec("tokens_per_s", "Throughput", "tokens per second", zero=True, noisy=True),
    ]
    built = [charts.build_chart(spec, [_series(run, spec.key) for run in runs]) for spec in specs]
    if several:
        unit = f"percent of the loss of {runs[0].name}"
        spec = charts.Spec("val_delta", "Validation loss, difference", unit, dots=True)
        built.insert(2, charts.build_chart(spec, _differences([_series(run, "val_loss") for run in runs])))
    return built


def _series(run: Run, key: str) -> charts.Series:
    lines, pick = (
        (run.metrics.training, _TRAINING[key])
        if key in _TRAINING
        else (run.metrics.validation, _VALIDATION[key])
    )
    return charts.Series(run.name, [line.step for line in lines], [pick(line) for line in lines])


def _differences(series: Sequence[charts.Series]) -> list[charts.Series]:
    """Each series against the first one, in percent, at the steps that both have; a finite base only."""
    first = series[0]
    base = {step: value for step, value in zip(first.steps, first.values) if math.isfinite(value) and value}
    return [
        charts.Series(
            one.run,
            [step for step in one.steps if step in base],
            [100 * (value / base[step] - 1) for step, value in zip(one.steps, one.values) if step in base],
        )
        for one in series
    ]


def _context(runs: Sequence[Run]) -> dict[str, Any]:
    environments = [run.environment for run in runs]
    configs = [run.config for run in runs]
    return {
        "runs": runs,
        "title": _title([run.name for run in runs]),
        "charts": build_charts(runs),
        "box": {"height": charts.HEIGHT, "left": charts.LEFT, "top": charts.TOP, "bottom": charts.BOTTOM},
        "summary": tables.summary_rows(runs),
        "any_skipped": any(run.metrics.skipped for run in runs),
        "any_non_finite": any(run.metrics.non_finite for run in runs),
        "config_differences": tables.differences(configs),
        "environment": tables.side_by_side(environments) if any(environments) else [],
        "environment_differs": {row.key for row in tables.differences(environments)},
        "samples": tables.sample_blocks(runs),
        "shown_characters": tables.SHOWN_CHARACTERS,
        "hits": tables.hit_counts(runs),
        "gemms": GEMMS,
        "absent": tables.ABSENT,
    }


def _title(names: Sequence[str], most: int = 4) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("quaver.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.globals["colour"] = run_class
    environment.filters["visible"] = visible
    environment.filters["thousands"] = lambda value: f"{value:,}"
    return environment


def visible(text: str) -> str:
    """Escapes control and other unprintable characters, which a browser would hide or obey; newlines and tabs stay."""
    return "".join(c if c in "\n\t" or c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def run_class(index: int) -> str:
    """CSS classes of a run: one of eight colours, then the same colours dashed."""
    dash = (index // _COLOURS) % _DASHES
    return f"s{index % _COLOURS}" + (f" d{dash}" if dash else "")


def _refuse_to_overwrite(path: Path) -> None:
    if not path.exists() and not path.is_symlink():
        return
    remedy = "give another file with --out"
    if not path.is_file():
        raise ConfigError("the report's path is not a file", where=str(path), remedy=remedy)
    try:
        with path.open("rb") as file:
            ours = file.read(len(SIGNATURE)) == SIGNATURE.encode()
    except OSError as error:
        what = f"the report's path cannot be read: {error}"
        raise ConfigError(what, where=str(path), remedy=remedy) from error
    if not ours:
        raise ConfigError(
            "a file that is no report of Quaver's lies there, and it is not overwritten",
            where=str(path),
            remedy=remedy,
        )


def _write(path: Path, html: str) -> None:
    """Writes beside the target and renames, so that a reader never sees half a page."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        try:
            # a lone surrogate, which JSON can hold and UTF-8 cannot, is escaped
            beside.write_text(html, encoding="utf-8", errors="backslashreplace")
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(
            f"the report cannot be written: {error.strerror or error}",
            where=str(path),
            remedy="give a writable file with --out",
        ) from error
