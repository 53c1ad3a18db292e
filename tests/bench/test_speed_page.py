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
    "kernels": {"path": "native", "reason": "compiled", "flags": ["-O3"]},
    "load_average_before": 0.0, "load_average_after": 1.0,
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


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"cores": 2}, "cores"),
        ({"transformers": "6"}, "transformers"),
        ({"kernels": {"path": "torch", "reason": "no compiler"}}, "kernels' path, kernels' flags"),
        ({"kernels": {"path": "native", "reason": "compiled", "flags": ["-O2"]}}, "kernels' flags"),
    ],
    ids=str,
)
def test_figures_of_other_kernels_versions_and_cores_do_not_mix(change: dict[str, Any], named: str) -> None:
    held = {"machine": MACHINE, "results": [figure("a", 1.0), figure("b", 2.0)]}
    with pytest.raises(ValueError, match=rf"\({named} differ\)"):
        speed_page.merge(held, {"machine": {**MACHINE, **change}, "results": [figure("b", 5.0)]})


def test_why_kernels_are_the_same_and_the_load_may_differ() -> None:
    held = {"machine": MACHINE, "results": [figure("a", 1.0), figure("b", 2.0)]}
    kernels = {**MACHINE["kernels"], "reason": "found in the cache"}
    other = {**MACHINE, "kernels": kernels, "load_average_before": 2.0}
    assert len(speed_page.merge(held, {"machine": other, "results": [figure("b", 5.0)]})["results"]) == 2


@pytest.fixture
def docs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A page for one and two threads, and the figures of two."""
    folder = tmp_path / "docs"
    folder.mkdir()
    monkeypatch.setattr(speed_page, "DOCS", folder)
    monkeypatch.setattr(speed_page, "PAGE", folder / "speed.md")
    marks = [mark for threads in (1, 2) for mark in speed_page.marks(threads)]
    (folder / "speed.md").write_text("\n".join(marks) + "\n")
    (folder / "speed-2-threads.json").write_text(json.dumps({"machine": MACHINE, "results": [figure("a", 1.0)]}))
    return folder


def test_a_file_is_taken_over(docs: Path, tmp_path: Path) -> None:
    new = tmp_path / "new.json"
    new.write_text(json.dumps({"machine": MACHINE, "results": [figure("b", 0.5)]}))
    assert speed_page.main([str(new)]) == 0
    page = (docs / "speed.md").read_text()
    assert "| `a` | 1.000 |" in page
    assert "| `b` | 0.500 |" in page
    assert len(json.loads((docs / "speed-2-threads.json").read_text())["results"]) == 2


WHOLE = {"machine": MACHINE, "results": [figure("b", 0.5)]}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "new.json cannot be read: No such file"),
        (json.dumps(WHOLE)[:50], "new.json is not whole JSON"),
        ("[]", "new.json is not what quaver bench --json writes"),
        (json.dumps({"results": []}), "new.json is not what quaver bench --json writes"),
        (json.dumps({**WHOLE, "machine": {**MACHINE, "cpu": None} | {"kernels": {}}}), "machine.kernels.path"),
        (json.dumps({**WHOLE, "machine": {k: v for k, v in MACHINE.items() if k != "torch"}}), "machine.torch"),
        (json.dumps({**WHOLE, "results": []}), "new.json lacks figures"),
        (json.dumps({**WHOLE, "results": [{"name": "b"}]}), "results.ratio"),
        (json.dumps({**WHOLE, "results": [{**figure("b", 0.5), "pairs": 6}]}), "fewer than 7 pairs of b"),
        (json.dumps({**WHOLE, "machine": {**MACHINE, "threads": 3}}), "threads 3"),
        (json.dumps({**WHOLE, "machine": {**MACHINE, "torch": "3"}}), "torch differ"),
    ],
    ids=[
        "missing", "half", "a list", "no machine", "no path", "no version", "no figures", "half a figure",
        "few pairs", "no section", "another torch",
    ],
)  # fmt: skip
def test_what_cannot_stand_on_the_page_is_one_sentence_and_nothing_is_written(
    text: str | None, told: str, docs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new = tmp_path / "new.json"
    if text is not None:
        new.write_text(text)
    before = {file.name: file.read_bytes() for file in docs.iterdir()}
    assert speed_page.main([str(new)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("speed_page: ")
    assert told in line
    assert {file.name: file.read_bytes() for file in docs.iterdir()} == before
