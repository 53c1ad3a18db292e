"""`quaver train`: runs `quaver.training.train` and shows it; `--dry-run` stops where training would begin.

May import: training, planning, config, errors, and this room.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from quaver.cli.console import err, out, printable, stdout_kept_clean, write_json
from quaver.cli.early_stop import EarlyStop
from quaver.cli.launch import LAUNCHED, launch
from quaver.cli.options import CONFIG, JSON, OVERRIDES
from quaver.errors import ConfigError

if TYPE_CHECKING:
    from quaver.config import RunConfig
    from quaver.training import Observer, RunResult


def _help_config(wanted: bool) -> None:
    if wanted:
        from quaver.config import help_config

        typer.echo(help_config())
        raise typer.Exit


def train(
    context: typer.Context,
    config: CONFIG,
    overrides: OVERRIDES = None,
    nproc: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Processes on this machine, one rank each; by default 1."),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The run's name: runs/NAME, or NAME-2 and so on."),
    ] = None,
    out_dir: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Folder of the run; must not exist yet.")
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on from the newest whole checkpoint of --out, else of runs/NAME*."),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check all that can be known without training, then stop.")
    ] = False,
    as_json: JSON = False,
    help_config: Annotated[
        bool,
        typer.Option(
            "--help-config",
            callback=_help_config,
            is_eager=True,
            help="Explain every key of a config.",
        ),
    ] = False,
) -> None:
    """Train a model from one YAML file.

    Ctrl-C ends the run after the step that it is in, with its folder complete (and a checkpoint, where the
    run saves any); Ctrl-C again stops at once.

    Example: quaver train configs/tiny/mxfp8.yaml training.steps=100 optimizer.lr=5e-4 --name trial
    """
    if name is not None and out_dir is not None:
        raise ConfigError("both name the run's folder", where="--name and --out", remedy="give one of them")
    if not dry_run:
        rank = os.environ.get("RANK", "0")
        context.with_resource(EarlyStop(launched=LAUNCHED in os.environ, speaks=rank == "0"))
    from quaver.config import Override, load_config

    changes = list(overrides or ())
    if name is not None:
        changes.append(Override(f"name={json.dumps(name)}", place="--name"))

    run_config = load_config(config, changes)  # before torch is imported: a typing error is told at once
    if nproc is not None and nproc > 1 and not dry_run:
        _launch(run_config, config, changes, nproc, out_dir, resume, as_json)
    with stdout_kept_clean(as_json):
        if dry_run:
            from quaver.cli.dry_run import check, show

            document = check(run_config, nproc, out_dir, resume=resume)
        else:
            result, observer = _train(run_config, out_dir, resume)
    if dry_run:
        write_json(document) if as_json else show(document, out())
    elif os.environ.get("RANK", "0") != "0":
        return  # several ranks, also torchrun's, speak with one voice
    elif as_json:
        write_json(result.to_json())
    else:
        _show_result(result, observer)


def _launch(
    run_config: RunConfig,
    path: Path,
    changes: list[str],
    nproc: int,
    out_dir: Path | None,
    resume: bool,
    as_json: bool,
) -> NoReturn:
    """Starts the ranks; what can be known beforehand is told once, here, and not by each of them."""
    from quaver.training import dry_run
    from quaver.training.lock import folder_locked_by

    dry_run(run_config, nproc, nproc)
    arguments = ["train", str(path), *changes]
    if out_dir is not None:
        arguments += ["--out", str(out_dir)]
    arguments += ["--resume"] * resume + ["--json"] * as_json
    raise typer.Exit(launch(arguments, nproc, lambda pid: folder_locked_by(pid, run_config.name, out_dir)))


def _train(config: RunConfig, out_dir: Path | None, resume: bool) -> tuple[RunResult, Observer]:
    """Trains with the observer that suits stderr."""
    console = err()
    if console.is_terminal:
        from quaver.cli.progress import ProgressView

        with ProgressView(console, config.name) as view:
            view.on_stage("loading torch and transformers", 0, None)
            return _run(config, out_dir, resume, view), view
    from quaver.cli.lines import LineView

    lines = LineView(config.name)
    return _run(config, out_dir, resume, lines), lines


def _run(config: RunConfig, out_dir: Path | None, resume: bool, observer: Any) -> RunResult:
    from quaver.training import train as train_run

    return train_run(config, out=out_dir, resume=resume, observer=observer)


def _show_result(result: RunResult, observer: Any) -> None:
    """The end of a run, on stdout: what a script wants to know comes last."""
    console = out()
    how = "stopped after" if result.interrupted else "finished"
    steps = f"{result.steps} {'step' if result.steps == 1 else 'steps'}"
    console.print(
        f"{how} {steps}: validation loss [bold]{result.val_loss:.4f}[/] nats/token"
        f"{observer.bits_per_byte}{observer.skipped_text}"
    )
    for label, path in (("folder", result.dir), ("report", result.report)):
        console.print(f"{label}  {printable(str(path))}", markup=False, soft_wrap=True)
