"""`quaver export`: a run's newest checkpoint as a Hugging Face folder, every tensor accounted for.

May import: training, checkpoint, config, errors, and this room.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quaver.cli.console import note, out, printable, stdout_kept_clean, write_json
from quaver.cli.options import JSON
from quaver.errors import ConfigError

DTYPES = ("bfloat16", "float32")
LAYOUTS = ("per_expert", "fused")


def export(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="Folder of a run that saved checkpoints, or of one of them.")
    ],
    out_dir: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Folder to write; must not exist yet.")
    ],
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32 (the masters as they are).")] = "bfloat16",
    experts: Annotated[
        str, typer.Option(help="per_expert, as DeepSeek publishes, or fused, as transformers builds.")
    ] = "per_expert",
    as_json: JSON = False,
) -> None:
    """Write a run's model as a Hugging Face folder: safetensors, config and tokeniser.

    The newest checkpoint that is whole is taken, or the one that is named.

    Example: quaver export runs/tiny-mxfp8 --out exported --dtype float32
    """
    for name, value, known in (("--dtype", dtype, DTYPES), ("--experts", experts, LAYOUTS)):
        if value not in known:
            raise ConfigError(f"{value!r} is not one of {', '.join(known)}", where=name)
    with stdout_kept_clean(as_json):
        from quaver.training.export import export_run

        done = export_run(run, out_dir, dtype=dtype, experts=experts, on_message=note)
    if as_json:
        write_json(done.as_json())
        return
    console, report = out(), done.report
    console.print(printable(f"step {done.step} of {done.checkpoint.parent.parent}"), markup=False, soft_wrap=True)
    size = sum(report.files.values()) / 2**20
    console.print(
        f"{len(report.weight_map)} tensors, {size:,.1f} MiB, {report.dtype}, experts {report.experts}"
    )
    for key, reason in report.dropped.items():
        console.print(printable(f"dropped {key}: {reason}"), markup=False)
    for key, reason in report.not_written.items():
        console.print(printable(f"not written {key}: {reason}"), markup=False)
    for text in report.notes:
        console.print(printable(text), markup=False)
    console.print(printable(f"folder  {report.folder}"), markup=False, soft_wrap=True)
