"""docs/speed.md holds what its files of figures say, for every figure that there is."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from quaver.bench import groups

ROOT = Path(__file__).resolve().parents[2]
_spec = importlib.util.spec_from_file_location("speed_page", ROOT / "benchmarks/speed_page.py")
assert _spec is not None
assert _spec.loader is not None
speed_page = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(speed_page)

MACHINE = {
    "cpu": "A CPU", "cpu_features": ["avx2"], "threads": 2, "cores": 4, "torch": "2", "transformers": "5",
    "kernels": {"path": "native", "reason": "compiled"}, "load_average_before": 0.0, "load_average_after": 1.0,
}  # fmt: skip


def figure(name: str, ratio: float, met: bool | None = None) -> dict[str, Any]:
    return {
        "name": name, "ratio": ratio, "target": None if met is None else 1.0, "met": met, "pairs": 7,
        "min": ratio, "max": ratio, "what": name,
    }  # fmt: skip


@pytest.mark.parametrize("threads", [1, 2])
def test_the_page_holds_the_figures_of_its_files(threads: int) -> None:
    document = json.loads(speed_page.figures_file(threads).read_text(encoding="utf-8"))
    assert document["machine"]["threads"] == threads
    page = (ROOT / "docs/speed.md").read_text(encoding="utf-8")
    assert speed_page.put_in(page, document) == page
    expected = {c.name: c.target for group in groups() for c in group.comparisons}
    found = {one["name"]: one["target"] for one in document["results"]}
    assert found == {name: target for name, target in expected.items() if name in found}
    if threads == 1:  # the table of the promised floors is whole; the other may lack a figure that came later
        assert found == expected


def test_figures_go_between_the_marks_of_their_threads() -> None:
    begin, end = speed_page.marks(2)
    others = "\n".join(speed_page.marks(1))
    page = speed_page.put_in(f"{others}\n{begin}\nold\n{end}\n", {"machine": MACHINE, "results": [figure("a", 0.5)]})
    assert page.startswith(f"{others}\n{begin}\n")
    assert "old" not in page
    assert "| `a` | 0.500 |" in page


def test_a_row_says_ratio_target_and_mark() -> None:
    text = speed_page.render(
        {"machine": MACHINE, "results": [figure("a", 0.5, True), figure("b", 2.0, False), figure("c", 3.0)]}
    )
    assert "| `a` | 0.500 | 1 | met | 0.500 to 0.500 | 7 | a |" in text
    assert "| `b` | 2.000 | 1 | **missed** |" in text
    assert "| `c` | 3.000 |  |  |" in text
    assert "kernels: native (compiled)" in text


def test_a_partial_file_replaces_what_it_has() -> None:
    held = {"machine": MACHINE, "results": [figure("a", 1.0), figure("b", 2.0)]}
    merged = speed_page.merge(held, {"machine": MACHINE, "results": [figure("b", 5.0), figure("c", 6.0)]})
    assert [(one["name"], one["ratio"]) for one in merged["results"]] == [("a", 1.0), ("b", 5.0), ("c", 6.0)]


def test_figures_of_two_machines_do_not_mix() -> None:
    held = {"machine": MACHINE, "results": [figure("a", 1.0), figure("b", 2.0)]}
    other = {**MACHINE, "threads": 8}
    with pytest.raises(ValueError, match="threads differ"):
        speed_page.merge(held, {"machine": other, "results": [figure("b", 5.0)]})
    whole = speed_page.merge(held, {"machine": other, "results": [figure("b", 5.0), figure("a", 4.0)]})
    assert [one["ratio"] for one in whole["results"]] == [4.0, 5.0]


def test_a_page_without_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="once each"):
        speed_page.put_in("no marks", {"machine": MACHINE, "results": []})
