"""`quaver bench`: what goes to which stream, and the exit codes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quaver.bench import BenchReport, Result, table

Run = Callable[..., Any]
MACHINE = {
    "cpu": "A CPU", "cpu_features": ["avx2"], "threads": 2, "torch": "2.13.0", "load_average_before": 0.1,
    "load_average_after": 0.2, "kernels": {"path": "torch", "reason": "no compiler"},
}  # fmt: skip


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """A report that was not measured; gives the arguments that it was asked for with."""
    asked: list[dict[str, Any]] = []

    def run(only: Any, **kwargs: Any) -> BenchReport:
        kwargs["on_progress"]("linear", 0, kwargs["pairs"])
        kwargs["on_progress"]("linear", 1, kwargs["pairs"])
        print("a library prints")
        asked.append({"only": list(only), "pairs": kwargs["pairs"], "threads": kwargs["threads"]})
        results = (
            Result("linear.a", "a over b", 0.98, 1.02, 7, 0.97, 1.1),
            Result("linear.b", "b over c", 1.5, 1.02, 7, 1.4, 1.6),
            Result("linear.c", "c over d", 2.0, None, 7, 1.9, 2.1),
        )
        return BenchReport(dict(MACHINE), results)

    monkeypatch.setattr("quaver.bench.run_bench", run)
    return asked


def test_json_is_all_of_stdout(quaver: Run, report: list[dict[str, Any]], home: Path) -> None:
    ended = quaver("bench", "--json", "--only", "linear.*", "--only", "x", "--pairs", "9", "--threads", "2")
    assert ended.code == 0
    document = json.loads(ended.out)
    assert document["machine"] == MACHINE
    first = document["results"][0]
    assert {k: first[k] for k in ("name", "ratio", "target", "pairs", "min", "max")} == {
        "name": "linear.a", "ratio": 0.98, "target": 1.02, "pairs": 7, "min": 0.97, "max": 1.1
    }  # fmt: skip
    assert document["results"][2]["target"] is None
    assert report == [{"only": ["linear.*", "x"], "pairs": 9, "threads": 2}]
    assert ended.err.splitlines() == ["measuring linear, 9 pairs", "a library prints"]


def test_the_table_marks_what_is_missed_and_ends_with_0(
    quaver: Run, report: list[dict[str, Any]], home: Path
) -> None:
    ended = quaver("bench")
    assert ended.code == 0
    rows = {line.split()[0]: line for line in ended.out.splitlines() if line.startswith("linear")}
    assert "0.980" in rows["linear.a"]
    assert " met " in rows["linear.a"]
    assert " missed " in rows["linear.b"]
    assert "met" not in rows["linear.c"]
    assert "missed" not in rows["linear.c"]
    assert "1 of 3 figures miss their target" in ended.err
    assert "kernels: torch (no compiler)" in ended.out
    assert report == [{"only": [], "pairs": 7, "threads": 1}]


def test_a_name_that_is_none_ends_with_2(quaver: Run, home: Path) -> None:
    ended = quaver("bench", "--only", "lineer.*", "--json")
    assert (ended.code, ended.out) == (2, "")
    assert "no benchmark is named 'lineer.*'" in ended.err


def test_a_missing_peer_ends_with_2(quaver: Run, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "find_spec", lambda name: None)
    ended = quaver("bench", "--only", "*.over_torchao")
    assert (ended.code, ended.out) == (2, "")
    assert "torchao is not installed" in ended.err
    assert "linear.mxfp8.over_torchao" in ended.err
