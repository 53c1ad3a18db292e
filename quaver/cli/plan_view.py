"""A plan for people: the tree, the parameter table, the hits and the verdicts, each collapsed to a screen.

May import: planning, assembly, surgery and this room.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from quaver.assembly import ShardVerdict
from quaver.cli.console import new_table
from quaver.planning import Node, PlanReport, collapse
from quaver.surgery import match

VERDICT_STYLES = {"aligned": "green", "exact": "cyan", "replicated": "yellow", "illegal": "bold red"}


def show(report: PlanReport, console: Console) -> None:
    """Everything that `quaver plan` prints."""
    _heading(console, "structure")
    console.print(_tree(report))
    _heading(console, "parameters")
    console.print(_parameters(report))
    _heading(console, "replacement plan")
    if report.recipe is None:
        console.print("low precision is off: nothing is replaced", style="dim")
    else:
        console.print(_hits(report.replacements, "modules"))
    if report.frozen:
        _heading(console, "frozen")
        console.print(_hits(report.frozen, "parameters"))
    if report.verdicts:
        replicas = report.world_size // report.shard_size
        ranks = f"{report.shard_size} {'rank' if report.shard_size == 1 else 'ranks'}"
        _heading(console, f"shards over {ranks}" + (f", {replicas} replicas" if replicas > 1 else ""))
        console.print(_verdicts(report))


def _heading(console: Console, text: str) -> None:
    console.print(Text(f"\n{text}", style="bold"))


def _tree(report: PlanReport) -> Tree:
    title = Text(report.structure.kind, style="bold")
    title.append(f"  {report.total:,} parameters", style="not bold")
    if report.spec is not None:
        title.append(f", equal to the specification {report.spec}", style="not bold green")
    if report.recipe is not None:
        title.append(f", {report.recipe}", style="not bold magenta")
    tree = Tree(title, guide_style="dim")
    for child in report.structure.children:
        _grow(tree, child)
    return tree


def _grow(tree: Tree, node: Node) -> None:
    label = Text(node.name)
    label.append(f"  {node.kind}", style="magenta" if node.low_precision else "dim")
    for name, shape in node.shapes.items():
        prefix = "" if name == "weight" and len(node.shapes) == 1 else f"{name} "
        label.append(f"  {prefix}{shape}", style="dim")
    if node.note:
        label.append(f"  {node.note}", style="cyan")
    if node.frozen:
        label.append("  frozen", style="yellow")
    if node.children:
        if node.count > 1:
            label.append(f"  {node.count} x {node.parameters // node.count:,} =")
        label.append(f"  {node.parameters:,}")
    branch = tree.add(label)
    for child in node.children:
        _grow(branch, child)


def _parameters(report: PlanReport) -> Table:
    table = new_table("category")
    table.add_column("parameters", justify="right")
    table.add_column("share", justify="right")
    rows = [*report.parameters.items(), ("total", report.total)]
    if report.recipe is not None:
        rows.append(("in low precision", report.low_precision_parameters))
    for name, number in rows:
        style = "bold" if name == "total" else ("magenta" if name == "in low precision" else None)
        share = f"{number / report.total:.2%}" if report.total else ""
        table.add_row(name, f"{number:,}", share, style=style, end_section=name == "other")
    return table


def _hits(entries: Iterable[dict[str, Any]], what: str) -> Table:
    table = new_table("pattern")
    table.add_column("hits", justify="right")
    table.add_column(what, overflow="fold")
    for entry in entries:
        names = Text("\n".join(collapse(entry["hits"])), style="dim")
        table.add_row(Text(entry["pattern"]), str(len(entry["hits"])), names)
    return table


def _verdicts(report: PlanReport) -> Table:
    table = new_table("weights", "count", "shape", "per rank", "verdict", "why")
    table.columns[1].justify = "right"
    groups: dict[ShardVerdict, list[str]] = {}  # verdicts that differ in the name alone
    for verdict in report.verdicts:
        groups.setdefault(replace(verdict, fqn=""), []).append(verdict.fqn)
    for verdict, fqns in groups.items():
        unit = "row" if len(verdict.shape) == 2 else "expert"
        unit += "s" if verdict.rows_per_rank != 1 else ""
        for name in collapse(fqns):
            table.add_row(
                Text(name),
                str(len(match(name, fqns))),
                str(list(verdict.shape)),
                f"{verdict.rows_per_rank} {unit}",
                Text(verdict.verdict, style=VERDICT_STYLES[verdict.verdict]),
                Text(verdict.reason),
            )
    return table
