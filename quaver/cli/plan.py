"""`quaver plan`. May import: planning, config and this room."""

from __future__ import annotations

from typing import Annotated

import typer

from quaver.cli.console import out, stdout_kept_clean, write_json
from quaver.cli.options import CONFIG, JSON, OVERRIDES


def plan(
    config: CONFIG,
    overrides: OVERRIDES = None,
    world_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Ranks, a multiple of fsdp_config.dp_shard_size; by default that, else 1.",
        ),
    ] = None,
    as_json: JSON = False,
) -> None:
    """Show what a config would build, on the meta device: no hardware, no memory, no data.

    Structure, parameters by category, what each pattern of the replacement plan hits, and whether each
    low-precision weight can be sharded over the ranks: aligned, exact (scales of blocks that shards cut are
    shared), replicated or illegal. Everything is shown first; any illegal shard then makes the exit code 2.

    With --json the keys memory_per_rank, communication and flops are empty: they come in a later release.

    Example: quaver plan configs/dsv3-16b/mxfp8.yaml --world-size 16
    """
    from quaver.config import load_config

    run_config = load_config(config, overrides or ())
    with stdout_kept_clean(as_json):
        from quaver.planning import plan as make_plan

        report = make_plan(run_config, world_size)
    if as_json:
        write_json(report.to_json())
    else:
        from quaver.cli.plan_view import show

        show(report, out())
    report.refuse_illegal()
