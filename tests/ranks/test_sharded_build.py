"""The sharded build: real widths on two ranks, prefetch that changes no bit, memory of one block plus shards."""

import json
import os

import pytest
from helpers.ranks import run_ranks
from helpers.real_widths import CONFIGS, REDUCED

MATRIX = pytest.mark.skipif(not os.environ.get("QUAVER_MATRIX"), reason="part of `make test-matrix`")


@MATRIX
@pytest.mark.parametrize("fmt", ["mxfp8", "hif8"])
def test_two_real_blocks_on_two_ranks_equal_one_process(fmt: str, corpus, tmp_path) -> None:
    sources = f"data.sources={json.dumps([{'path': str(corpus)}])}"
    overrides = [*REDUCED, sources, f"data.cache_dir={tmp_path / 'cache'}", "fsdp_config.dp_shard_size=null"]
    run = {"file": str(CONFIGS / f"{fmt}.yaml"), "overrides": overrides, "ranks": 2, "steps": 3}
    alone = run_ranks("cases", "reference_case", [run], ranks=1)[0]
    together = run_ranks("cases", "train_case", [run], ranks=2)[0]
    assert together["losses"] == alone["losses"]
    assert len(set(together["losses"])) == 3
    assert together["norms"] == alone["norms"]
    assert together["masters"] == alone["masters"]
    assert together["ledger_ok"] is True


@pytest.mark.slow
def test_prefetch_changes_no_bit(case) -> None:
    """torch's own, one of two layers ahead both ways, and none."""
    for fmt in ("mxfp8", "hif8"):
        kinds = [case(format=fmt, prefetch=kind, recompute="full") for kind in ("implicit", "explicit", "off")]
        usual, explicit, off = run_ranks("build_cases", "prefetch_case", kinds, ranks=2)
        assert 0 < usual.pop("ahead") < explicit.pop("ahead")
        off.pop("ahead")
        assert usual == explicit == off, fmt


@pytest.mark.slow
def test_building_takes_one_block_and_the_shards(case) -> None:
    """A unit is there in BF16 and in FP32, once whole and once in shards; two ranks keep half of the masters."""
    runs = [case(format=f, model={"num_hidden_layers": 12}) for f in ("bf16", "mxfp8", "hif8")]
    for run, found in zip(runs, run_ranks("build_cases", "build_memory_case", runs, ranks=2)):
        assert found["shards"] == pytest.approx(found["all"] * 4 / 2, rel=0.01)
        allowed = found["shards"] + found["largest"] * (2 + 4 + 4)
        assert allowed < 0.8 * found["all"] * 4  # else the bound would not tell a whole model from shards
        assert found["shards"] <= found["peak"] <= allowed, run


@pytest.mark.slow
def test_gathered_memory_falls_back_after_each_block(case) -> None:
    runs = [case(format=f, reshard=r) for f in ("mxfp8", "hif8", "bf16") for r in (True, False)]
    for run, found in zip(runs, run_ranks("build_cases", "gather_memory_case", runs, ranks=2)):
        assert all(size > 0 for size in found["during"])
        if run["reshard"]:
            assert found["after"] == [0] * len(found["after"]), run
        else:
            assert found["after"] == sorted(found["after"]), run
            assert found["after"][-1] > found["after"][0] > 0, run
        assert found["end"] == 0, run


@pytest.mark.slow
def test_an_expert_is_idle_if_no_rank_has_sent_it_a_token() -> None:
    assert run_ranks("build_cases", "idle_case", [{"experts": 4}], ranks=2) == [["experts[2]", "experts[3]"]]


@MATRIX
def test_resharding_to_some_of_the_ranks_is_refused_by_name() -> None:
    told = run_ranks("build_cases", "integer_reshard_case", [{"format": "mxfp8"}], ranks=4)[0]
    assert "reshard_after_forward is a number of ranks" in told
    assert "0.weight" in told
