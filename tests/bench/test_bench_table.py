"""Which figures there are, which ones a glob chooses, and what a missing peer does."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from quaver.bench import chosen_groups, groups, run_bench, table, torchao_peer
from quaver.bench.comparison import Comparison, Group, Peer
from quaver.errors import CapabilityError, ConfigError

# the floors that the project promises; a changed figure is a changed promise
TARGETS = {
    "quantise.mxfp8.row": None,
    "quantise.mxfp8.col": None,
    "quantise.mxfp8.both": 3.6,
    "quantise.hif8.row": None,
    "quantise.hif8.both": 3.6,
    "quantise.mxfp8.gradient": None,
    "quantise.mxfp8.input": None,
    "linear.mxfp8.over_bf16": 1.02,
    "linear.hif8.over_bf16": 1.04,
    "linear.mxfp8.over_torchao": 0.588,
    "experts.mxfp8.over_bf16": 1.12,
    "experts.hif8.over_bf16": None,
    "experts.mxfp8.over_bf16_uneven": None,
    "experts.mxfp8.over_torchao": 0.25,
    "experts.mxfp8.over_torchao_uneven": None,
    "step.mxfp8.over_bf16": 1.05,
    "step.mxfp8.over_stock": 0.6,
    "step.mxfp8.over_autocast": None,
    "step.mxfp8.over_gemms": 1.7,
    "step.hif8.over_bf16": 1.05,
    "step.hif8.over_stock": 0.6,
    "step.hif8.over_autocast": None,
    "step.hif8.over_gemms": 1.7,
    "step.bf16.over_stock": None,
    "step.bf16.over_autocast": None,
    "step.bf16.over_gemms": None,
    "trainer.over_step": 1.02,
    "loader.over_step": None,
    "checkpoint.stall": 1.05,
    "checkpoint.lost": None,
}


def fake(name: str, *names: str, peers: dict[str, Peer] | None = None) -> Group:
    def rounds(sizes, needed, pairs, on_round):
        on_round(pairs)
        return [dict.fromkeys(needed, 1.0) | {"ours": 2.0}] * pairs

    comparisons = tuple(Comparison(f"{name}.{n}", "ours", n, 1.0, n) for n in names)
    return Group(name, comparisons, rounds, peers or {})


def test_the_figures_and_their_targets() -> None:
    found = {c.name: c.target for group in groups() for c in group.comparisons}
    assert found == TARGETS
    assert sum(len(group.comparisons) for group in groups()) == len(TARGETS)


def test_globs_choose_and_keep_the_order() -> None:
    all_groups = [fake("a", "x", "y"), fake("b", "x"), fake("c", "z")]
    chosen = chosen_groups(all_groups, ["c.*", "*.x"])
    assert [c.name for group in chosen for c in group.comparisons] == ["a.x", "b.x", "c.z"]
    assert chosen_groups(all_groups, []) == all_groups


def test_contestants_of_figures_that_were_not_chosen_are_not_built() -> None:
    (group,) = chosen_groups(groups(), ["linear.hif8.over_bf16"])
    assert group.needed() == {"hif8", "bf16"}


def test_a_glob_that_matches_nothing_is_an_error_that_names_what_there_is() -> None:
    with pytest.raises(ConfigError, match=r"'steps\.\*'") as caught:
        run_bench(["linear.*", "steps.*"])
    assert caught.value.exit_code == 2
    assert "step.mxfp8.over_bf16" in (caught.value.remedy or "")


def test_a_missing_peer_ends_it_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(table, "find_spec", lambda name: None if name == "torchao" else find(name))
    monkeypatch.setattr(table, "describe_machine", lambda: pytest.fail("it went on"))
    with pytest.raises(CapabilityError, match="torchao is not installed") as caught:
        run_bench(["linear.*", "experts.*"])
    assert caught.value.exit_code == 2
    assert caught.value.where == (
        "linear.mxfp8.over_torchao, experts.mxfp8.over_torchao, experts.mxfp8.over_torchao_uneven"
    )
    assert caught.value.remedy is not None
    assert f"pip install --no-deps torchao=={torchao_peer.VERSION}" in caught.value.remedy
    assert "--only" in caught.value.remedy


def test_the_peer_that_is_asked_for_is_the_one_of_the_constraints() -> None:
    pinned = (Path(__file__).resolve().parents[2] / "constraints.txt").read_text(encoding="utf-8")
    assert f"torchao=={torchao_peer.VERSION}" in pinned.splitlines()


def test_a_peer_without_what_is_used_of_it_is_found_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty folder of that name is a package, too."""
    (tmp_path / "torchao").mkdir()
    (tmp_path / "torchao/__init__.py").touch()
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchao"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(table, "describe_machine", lambda: pytest.fail("it went on"))
    told = r"the peer torchao is installed, but not fit to be measured: No module named 'torchao\."
    with pytest.raises(CapabilityError, match=told) as caught:
        run_bench(["*.over_torchao"])
    assert caught.value.where == "linear.mxfp8.over_torchao, experts.mxfp8.over_torchao"
    del sys.modules["torchao"]  # the empty one that was imported just now; the one before comes back by itself


def test_a_peer_that_no_chosen_figure_needs_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "find_spec", lambda name: None)
    group = fake("a", "x", "torchao", peers={"torchao": torchao_peer.PEER})
    assert [r.name for r in run_bench(["a.x"], pairs=2, all_groups=[group]).results] == ["a.x"]


def test_the_report() -> None:
    told: list[tuple[str, int, int]] = []
    report = run_bench(
        pairs=3, all_groups=[fake("a", "x"), fake("b", "y")], on_progress=lambda *t: told.append(t)
    )
    document = report.to_json()
    assert [(r["name"], r["ratio"], r["pairs"], r["met"]) for r in document["results"]] == [
        ("a.x", 2.0, 3, False),
        ("b.y", 2.0, 3, False),
    ]
    machine = document["machine"]
    assert {"cpu", "cpu_features", "threads", "torch", "load_average_before", "load_average_after"} <= set(
        machine
    )
    assert machine["kernels"]["path"] in ("native", "torch")
    assert machine["kernels"]["reason"]
    assert told == [("a", 0, 3), ("a", 3, 3), ("b", 0, 3), ("b", 3, 3)]


@pytest.mark.parametrize("threads", [3, 99999999999])
def test_more_threads_than_cores_are_refused(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "cores", lambda: 2)
    before = torch.get_num_threads()
    with pytest.raises(ConfigError, match=f"^{threads} threads are more than the cores .*: 2") as caught:
        run_bench(all_groups=[fake("a", "x")], threads=threads)
    assert (caught.value.exit_code, caught.value.where) == (2, "--threads")
    assert torch.get_num_threads() == before


def test_figures_are_made_with_the_threads_that_were_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "cores", lambda: 2)
    before, seen = torch.get_num_threads(), []

    def rounds(sizes, needed, pairs, on_round):
        seen.append(torch.get_num_threads())
        return [{"ours": 2.0, "x": 1.0}] * pairs

    group = Group("a", (Comparison("a.x", "ours", "x", None, "x"),), rounds, {})
    for threads in (1, 2):
        report = run_bench(all_groups=[group], threads=threads, pairs=1)
        assert report.machine["threads"] == threads
        assert torch.get_num_threads() == before
    assert seen == [1, 2]
