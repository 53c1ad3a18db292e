"""Four ranks and 2x2 replicas within rounding; weights whose shards cut blocks; weights that cannot be sharded."""

import math
import os

import pytest
import torch
from helpers.ranks import run_ranks

MATRIX = pytest.mark.skipif(not os.environ.get("QUAVER_MATRIX"), reason="part of `make test-matrix`")


@pytest.fixture
def case(corpus, tmp_path_factory):
    cache = str(tmp_path_factory.getbasetemp() / "ranks-cache")

    def make(**rest) -> dict:
        return {"corpus": str(corpus), "cache": cache, **rest}

    return make


def nrmse(a: dict, b: dict) -> float:
    """Root of the squared differences over the root of the squares, all masters together."""
    assert a.keys() == b.keys()
    difference = sum(float((a[n].double() - b[n].double()).square().sum()) for n in a)
    return math.sqrt(difference / sum(float(t.double().square().sum()) for t in a.values()))


def relative(a: list[str], b: list[str]) -> float:
    """Largest relative difference of two lists of losses."""
    pairs = [(float.fromhex(x), float.fromhex(y)) for x, y in zip(a, b, strict=True)]
    return max(abs(x - y) / abs(x) for x, y in pairs)


@MATRIX
@pytest.mark.parametrize("fmt", ["bf16", "mxfp8", "hif8"])
def test_four_ranks_and_two_by_two_stay_within_rounding(case, tmp_path, fmt: str) -> None:
    """Four terms summed in another order differ in the last bit; over 10 steps that stays tiny."""
    common = {"format": fmt, "steps": 10, "batch": 1, "ranks": 4, "model": {"n_routed_experts": 8}}
    runs = [
        case(**common, save=str(tmp_path / "one.pt")),
        case(**common, save=str(tmp_path / "four.pt")),
        case(**common, save=str(tmp_path / "grid.pt"), overrides=["fsdp_config.dp_shard_size=2"]),
    ]
    one = run_ranks("cases", "reference_case", runs[:1], ranks=1)[0]
    four, grid = run_ranks("cases", "train_case", runs[1:], ranks=4)
    assert grid["replicas_equal"] is True
    masters = {n: torch.load(tmp_path / f"{n}.pt", weights_only=True) for n in ("one", "four", "grid")}
    for other, name in ((four, "four"), (grid, "grid")):
        assert relative(one["losses"], other["losses"]) <= 1e-5
        assert nrmse(masters["one"], masters[name]) <= 1e-6
    assert nrmse(masters["four"], masters["grid"]) <= 1e-6


@pytest.mark.slow
def test_eight_experts_on_two_ranks(case) -> None:
    both = [case(format="mxfp8", ranks=2, model={"n_routed_experts": 8})]
    alone = run_ranks("cases", "reference_case", both, ranks=1)[0]
    together = run_ranks("cases", "train_case", both, ranks=2)[0]
    assert together.pop("gemms") * 2 == alone.pop("gemms")  # each rank runs its own half
    assert together == alone


@pytest.mark.slow
def test_shards_that_cut_blocks_are_exact(case) -> None:
    """Whatever rows a rank holds: the gathered codes and scales are those of the whole weight, so are all three
    products bit for bit, and after an optimiser step and its refresh the codes are again."""
    rows = (96, 80, 72, 352, 392, 1368)
    shapes = [case(format=f, rows=r, columns=96) for f in ("mxfp8", "hif8") for r in rows]
    answers = run_ranks("cases", "gathered_case", shapes, ranks=2)
    for shape, answer in zip(shapes, answers):
        assert answer.pop("cut") == (shape["rows"] % 32 != 0 and shape["format"] == "mxfp8"), shape
        assert answer == dict.fromkeys(answer, True), shape
        assert len(answer) == 6


@pytest.mark.slow
def test_three_ranks_refuse_by_name_or_keep_weights_whole(case) -> None:
    runs = [
        case(format=f, ranks=3, steps=3, overrides=["fsdp_config.fallback_to_unsharded=true"])
        for f in ("mxfp8", "hif8")
    ]
    refused, *kept = run_ranks("cases", "train_or_refuse", [case(format="mxfp8"), *runs], ranks=3)
    assert "model.layers.0.self_attn.q_proj.weight" in refused["error"]
    assert "64 rows do not divide by 3 ranks" in refused["error"]
    assert "fallback_to_unsharded" in refused["error"]
    alone = run_ranks("cases", "reference_case", runs, ranks=1)
    for one, three in zip(alone, kept):
        assert "model.layers.1.mlp.experts.gate_up_proj" in three["replicated"]
        assert "model.layers.0.self_attn.q_proj.weight" in three["replicated"]
        assert three["ledger_ok"] is True
        assert three["gemms"] * 3 == one["gemms"]  # every rank runs its own third, all in eight bits
        assert relative(one["losses"], three["losses"]) <= 1e-5
        assert three["plain_keys"] is True
