"""`quaver doctor`. May import: this room; the examination itself is in examine.py."""

from __future__ import annotations

from typing import Any

from rich.text import Text

from quaver.cli.console import new_table, out, printable, stdout_kept_clean, write_json
from quaver.cli.figures import files
from quaver.cli.options import JSON
from quaver.errors import CapabilityError

Row = tuple[str, str, bool | None, str]

MARKS = {True: ("ok", "green"), False: ("no", "yellow"), None: ("", "dim")}


def doctor(as_json: JSON = False) -> None:
    """Show which backends, versions and tools this machine has, and what is missing for each.

    Nothing is changed. The exit code is 0 whatever is found: not every machine needs everything.

    Example: quaver doctor --json
    """
    with stdout_kept_clean(as_json):
        try:
            from quaver.cli.examine import examine
        except ImportError as error:  # transformers imports torch_npu wherever it is installed
            raise CapabilityError(
                f"a package that Quaver needs cannot be imported: {error}",
                remedy="install it; with torch_npu, set up CANN first (source its set_env.sh) or uninstall torch_npu",
            ) from error

        document = examine()
    if as_json:
        write_json(document)
        return
    table = new_table("", "found", "", "needed for, or what to do")
    for label, found, ok, text in _rows(document):
        word, style = MARKS[ok]
        table.add_row(
            label, Text(printable(found)), Text(word, style=style), Text(printable(text), style="dim")
        )
    out().print(table)


def _rows(document: dict[str, Any]) -> list[Row]:
    rows: list[Row] = [("quaver", document["quaver"], True, "")]
    for one in document["versions"]:
        rows.append(
            (one["name"], one["version"] or "not installed", one["ok"], f"supported: {one['supported']}")
        )
    cpu, compiler = document["cpu"], document["compiler"]
    threads = f"{cpu['threads']} of {cpu['cores']} cores used"
    rows.append(("cpu", f"{cpu['name']}, {cpu['capability']}", None, threads))
    rows.append(
        ("avx512_bf16", "yes" if cpu["avx512_bf16"] else "no", None, "speed of BF16 GEMMs, never a number")
    )
    rows.append(("c++ compiler", compiler["path"] or "none", None, compiler["needed_for"]))
    kernels = document["kernels"]
    why = ". ".join(filter(None, (kernels["reason"], kernels["remedy"])))
    rows.append(("cpu kernels", kernels["path"], kernels["path"] == "native", why))
    for backend in document["backends"]:
        rows += _backend_rows(backend)
    corpus, cache = document["default_corpus"], document["cache"]
    found = f"{files(corpus['files'])} in {corpus['path']}"
    rows.append(
        (f"corpus {corpus['name']}", found, corpus["ok"], corpus["remedy"] or "data.sources, by default")
    )
    rows.append(("token cache", cache["path"], cache["writable"], cache["remedy"] or "tokenised corpora"))
    rows.append(("free disk", f"{cache['free_bytes'] / 1e9:.1f} GB", None, "beside the token cache"))
    return rows


def _backend_rows(backend: dict[str, Any]) -> list[Row]:
    """One row a recipe, a reason that all share once; then one a thing that recipes need of the device."""
    said = [
        (one["usable"], ". ".join(filter(None, (one["needs"], one["remedy"])))) for one in backend["recipes"]
    ]
    ids = [one["id"] for one in backend["recipes"]]
    if len(set(said)) == 1:
        ids, said = ["\n  ".join(ids)], said[:1]
    device = backend["device"] or "no device"
    versions = ", ".join(f"{name} {number or 'not there'}" for name, number in backend["versions"].items())
    head: Row = (f"backend {backend['name']}", device, backend["usable"], versions)
    recipes: list[Row] = [("", f"  {recipe}", ok, text) for recipe, (ok, text) in zip(ids, said)]
    return [head, *recipes, *_requirement_rows(backend)]


def _requirement_rows(backend: dict[str, Any]) -> list[Row]:
    """Each operator and dtype, with the recipes that need it."""
    needed: dict[tuple[str, str, bool, str | None], list[str]] = {}
    for recipe in backend["recipes"]:
        for one in recipe["requirements"]:
            key = (one["kind"], one["name"], one["ok"], one["missing"])
            needed.setdefault(key, []).append(recipe["id"])
    return [
        ("", f"  {kind} {name}", ok, ", ".join(([missing] if missing else []) + [f"for {' and '.join(ids)}"]))
        for (kind, name, ok, missing), ids in needed.items()
    ]
