"""`quaver train --dry-run`: what was checked, as a document and as a table.

May import: training, planning, data, distributed, config and this room.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from quaver.cli.console import printable
from quaver.cli.figures import count, files

if TYPE_CHECKING:
    from quaver.config import RunConfig


def check(
    config: RunConfig, nproc: int | None, out_dir: Path | None, *, resume: bool = False
) -> dict[str, Any]:
    """Every check that needs no training; the folder and the token cache are not made.

    Args:
        config: the run's config.
        nproc: ranks, all of them on this machine; None: those that a launcher started, else
            `fsdp_config.dp_shard_size`, else 1.
        out_dir: the run's folder, if it was named.
        resume: it may exist.

    Raises:
        ConfigError, PlanError, CapabilityError: what the run itself would end with.
    """
    from quaver.data.sources import find_sources
    from quaver.distributed import launched_world_size, local_ranks
    from quaver.planning import plan_report, ranks_of
    from quaver.training import check_documents, check_run_folder, dry_run, find_run_folder

    here = nproc
    if nproc is None and launched_world_size() > 1:
        nproc, here = launched_world_size(), local_ranks()
    ranks, shards = ranks_of(config, nproc)
    if here is None and ranks == 1:
        here = 1  # else nobody knows yet how many machines share the ranks
    if not (resume and find_run_folder(config.name, out_dir)):
        check_run_folder(out_dir)
    assembly = dry_run(config, ranks, here)
    check_documents(config.data, assembly.hf_config.vocab_size)
    report = plan_report(assembly, ranks, shards)
    training = config.training
    return {
        "name": config.name,
        "recipe": report.recipe,
        "world_size": ranks,
        "start_with": f"--nproc {ranks}" if nproc is None and ranks > 1 else None,
        "parameters": report.total,
        "low_precision_parameters": report.low_precision_parameters,
        "replacements": report.replacements,
        "frozen": report.frozen,
        "verdicts": dict(Counter(verdict.verdict for verdict in report.verdicts)),
        "sources": [
            {
                "name": source.name,
                "path": str(source.root),
                "weight": source.weight,
                "files": len(source.files),
                "bytes": sum(file.path.stat().st_size for file in source.files),
                "left_out": len(source.left_out),
            }
            for source in find_sources(config.data.sources)
        ],
        "tokenizer": config.data.tokenizer,
        "steps": training.steps,
        "tokens_per_step": training.micro_batch_size
        * config.data.seq_len
        * config.gradient_accumulation_steps
        * ranks,
    }


def show(document: dict[str, Any], console: Console) -> None:
    """The document for people."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(overflow="fold")

    def row(label: str, text: str) -> None:
        table.add_row(label, Text(printable(text)))

    row("run", document["name"])
    size = f"{document['parameters']:,} parameters"
    if document["recipe"] is not None:
        share = document["low_precision_parameters"] / document["parameters"]
        size += f", {share:.1%} of them in {document['recipe']}"
    else:
        size += ", low precision off"
    row("model", size)
    for index, entry in enumerate(document["replacements"]):
        row("" if index else "replaced", f"{len(entry['hits']):>4}  {entry['pattern']}")
    for index, entry in enumerate(document["frozen"]):
        row("" if index else "frozen", f"{len(entry['hits']):>4}  {entry['pattern']}")
    ranks = document["world_size"]
    verdicts = ", ".join(f"{number} {verdict}" for verdict, number in document["verdicts"].items())
    row("shards", f"{ranks} {'rank' if ranks == 1 else 'ranks'}: {verdicts or 'nothing in low precision'}")
    if document["start_with"] is not None:
        row("", f"for {ranks} ranks: start with {document['start_with']}")
    for index, source in enumerate(document["sources"]):
        left = f", {source['left_out']} left out" if source["left_out"] else ""
        row(
            "" if index else "data",
            f"{source['name']}: {files(source['files'])}, {count(source['bytes'])}B{left}, {source['path']}",
        )
    row("tokenizer", document["tokenizer"])
    row("steps", f"{document['steps']:,} of {document['tokens_per_step']:,} tokens")
    console.print(table)
    console.print("dry run: nothing was trained or written", style="green")
