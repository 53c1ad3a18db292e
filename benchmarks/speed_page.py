"""Puts the figures of a `quaver bench --json` into docs/speed.md, between the two marks of their number of threads.

    python benchmarks/speed_page.py                  renders docs/speed*.json, the figures that the page stands on
    python benchmarks/speed_page.py results.json     takes over a new file first: as docs/speed.json, or with more
                                                     than one thread as docs/speed-N-threads.json

A partial file (made with --only) replaces the figures that it has and is refused where the machine differs.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE = DOCS / "speed.md"
SAME = ("cpu", "cpu_features", "threads", "torch")  # what two files must share to stand in one table


def figures_file(threads: int) -> Path:
    """Where the figures of so many threads are kept."""
    return DOCS / ("speed.json" if threads == 1 else f"speed-{threads}-threads.json")


def marks(threads: int) -> tuple[str, str]:
    """Between which lines of the page they stand."""
    return f"<!-- figures, threads {threads}: begin -->", f"<!-- figures, threads {threads}: end -->"


def render(document: dict[str, Any]) -> str:
    """The machine in a paragraph and the figures in a table."""
    machine = document["machine"]
    kernels = machine["kernels"]
    lines = [
        f"Measured on {machine['cpu']} with {', '.join(machine['cpu_features'])}; threads: {machine['threads']} on "
        f"{machine['cores']} cores; torch {machine['torch']}, transformers {machine['transformers']}; kernels: "
        f"{kernels['path']} ({kernels['reason']}); load average {machine['load_average_before']} before and "
        f"{machine['load_average_after']} after.",
        "",
        "| figure | ratio | target | | min to max | pairs | what over what |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in document["results"]:
        target = "" if one["target"] is None else f"{one['target']:g}"
        mark = {True: "met", False: "**missed**", None: ""}[one["met"]]
        spread = f"{one['min']:.3f} to {one['max']:.3f}"
        cells = (f"`{one['name']}`", f"{one['ratio']:.3f}", target, mark, spread, one["pairs"], one["what"])
        lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return "\n".join(lines)


def put_in(page: str, document: dict[str, Any]) -> str:
    """The page with the figures between their marks; ValueError if it has not exactly one of each."""
    begin, end = marks(document["machine"]["threads"])
    if page.count(begin) != 1 or page.count(end) != 1:
        raise ValueError(f"the page needs {begin} and {end} once each")
    head, rest = page.split(begin)
    return f"{head}{begin}\n{render(document)}\n{end}{rest.split(end)[1]}"


def merge(held: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """The new figures, and of the held ones those that the new file does not have; ValueError on another machine."""
    fresh = {one["name"]: one for one in new["results"]}
    kept = [one for one in held["results"] if one["name"] not in fresh]
    differs = [key for key in SAME if held["machine"].get(key) != new["machine"].get(key)]
    if kept and differs:
        raise ValueError(f"a partial file of another machine ({', '.join(differs)} differ): measure all figures")
    order = [one["name"] for one in held["results"]]
    every = {one["name"]: one for one in (*kept, *new["results"])}
    names = [*(n for n in order if n in every), *(n for n in every if n not in order)]
    return {"machine": new["machine"], "results": [every[name] for name in names]}


def main() -> None:
    """Takes over a file, if one is given, and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="?", type=Path, help="what quaver bench --json wrote")
    given = parser.parse_args().results
    if given is not None:
        new = json.loads(given.read_text(encoding="utf-8"))
        figures = figures_file(new["machine"]["threads"])
        document = merge(json.loads(figures.read_text(encoding="utf-8")), new) if figures.exists() else new
        figures.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    for figures in sorted(DOCS.glob("speed*.json")):
        document = json.loads(figures.read_text(encoding="utf-8"))
        PAGE.write_text(put_in(PAGE.read_text(encoding="utf-8"), document), encoding="utf-8")
        print(f"{PAGE}: {len(document['results'])} figures of {document['machine']['threads']} threads")


if __name__ == "__main__":
    main()
