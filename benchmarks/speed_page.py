"""Puts the figures of a `quaver bench --json` into docs/speed.md, between the two marks of their number of threads.

    python benchmarks/speed_page.py                  renders docs/speed*.json, the figures that the page stands on
    python benchmarks/speed_page.py results.json     takes over a new file first: as docs/speed.json, or with more
                                                     than one thread as docs/speed-N-threads.json

A partial file (made with --only) replaces the figures that it has and is refused where the machine, the kernels or
the versions differ. Files that are not whole, and figures of fewer than seven pairs, are refused: with one sentence on
stderr and exit code 2, before anything is written.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE = DOCS / "speed.md"
PAIRS = 7  # fewest that a figure of the page is a median of
SAME = ("cpu", "cpu_features", "cores", "threads", "torch", "transformers")  # what files of one table must share,
SAME_KERNELS = ("path", "flags", "detours")  # and of their kernels
MACHINE = (*SAME, "kernels", "load_average_before", "load_average_after")  # what the page says of the machine
FIGURE = ("name", "ratio", "target", "met", "pairs", "min", "max", "what")  # and of a figure


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
    why = "; ".join([kernels["reason"], *kernels.get("detours", ())])
    lines = [
        f"Measured on {machine['cpu']} with {', '.join(machine['cpu_features'])}; threads: {machine['threads']} on "
        f"{machine['cores']} cores; torch {machine['torch']}, transformers {machine['transformers']}; kernels: "
        f"{kernels['path']} ({why}); load average {machine['load_average_before']} before and "
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
    fresh = {one["name"] for one in new["results"]}
    kept = [one for one in held["results"] if one["name"] not in fresh]
    differs = differing(held["machine"], new["machine"])
    if kept and differs:
        raise ValueError(f"a partial file made elsewhere ({', '.join(differs)} differ): measure all figures")
    order = [one["name"] for one in held["results"]]
    every = {one["name"]: one for one in (*kept, *new["results"])}
    names = [*(n for n in order if n in every), *(n for n in every if n not in order)]
    return {"machine": new["machine"], "results": [every[name] for name in names]}


def differing(held: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """What figures of one table must share, and these two machines do not."""
    kernels = held["kernels"], new["kernels"]
    return [
        *(key for key in SAME if held[key] != new[key]),
        # torch's own kernels have no flags
        *(f"kernels' {key}" for key in SAME_KERNELS if kernels[0].get(key) != kernels[1].get(key)),
    ]


def read(file: Path) -> dict[str, Any]:
    """A file of figures that can stand on the page; ValueError for any other."""
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{file} is not whole JSON ({error}): measure again") from error
    try:
        lacking = [f"machine.{key}" for key in MACHINE if key not in document["machine"]]
        lacking += [f"machine.kernels.{key}" for key in ("path", "reason") if key not in document["machine"]["kernels"]]
        lacking += [f"results.{key}" for key in FIGURE if any(key not in one for one in document["results"])]
        few = [one["name"] for one in document["results"] if one.get("pairs", PAIRS) < PAIRS]
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is not what quaver bench --json writes ({error!r}): write it with that") from error
    if lacking or not document["results"]:
        raise ValueError(f"{file} lacks {', '.join(lacking) or 'figures'}: write it with quaver bench --json")
    if few:
        raise ValueError(f"{file} has fewer than {PAIRS} pairs of {', '.join(few)}: measure with --pairs {PAIRS}")
    return document


def take_over(given: Path | None) -> None:
    """Makes everything that is to be written, and then writes it."""
    documents = {file: read(file) for file in sorted(DOCS.glob("speed*.json"))}
    if given is not None:
        new = read(given)
        file = figures_file(new["machine"]["threads"])
        documents[file] = merge(documents[file], new) if file in documents else new
    page = PAGE.read_text(encoding="utf-8")
    for document in documents.values():
        page = put_in(page, document)
    if given is not None:
        file.write_text(json.dumps(documents[file], indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    PAGE.write_text(page, encoding="utf-8")
    for document in documents.values():
        print(f"{PAGE}: {len(document['results'])} figures of {document['machine']['threads']} threads")


def main(arguments: Sequence[str] | None = None) -> int:
    """Takes over a file, if one is given, and writes the page; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="?", type=Path, help="what quaver bench --json wrote")
    try:
        take_over(parser.parse_args(arguments).results)
    except (OSError, ValueError) as error:
        print(f"speed_page: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
