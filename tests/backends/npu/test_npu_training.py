"""Whole training steps through the npu adapter, bit-equal to the reference backend: losses, norms, masters."""

from __future__ import annotations

import json

import pytest
from helpers.micro import micro_document
from helpers.npu_harness import cases as harness_cases
from helpers.ranks import run_ranks
from helpers.sharding import one_rank

import quaver

TIMED = {"tokens_per_s"}
ODD = {"kv_lora_rank": 33}  # 49 rows of kv_a_proj_with_mqa: no two ranks can share them
GEMMS = {"npu_quant_matmul", "npu_grouped_matmul"}
OPERATORS = {
    "mxfp8": GEMMS | {"npu_dynamic_mx_quant", "npu_dynamic_mx_quant_with_dual_axis", "npu_grouped_dynamic_mx_quant"},
    "hif8": GEMMS | {"npu_dynamic_quant", "npu_quantize"},
}
ONE_RANK = [
    {"format": "mxfp8", "accumulation": 2, "recompute": "full"},
    {"format": "mxfp8", "overrides": ["low_precision.scale_rule=rceil"], "reshard": False},
    {"format": "hif8", "accumulation": 2, "recompute": "full"},
]
TWO_RANKS = [
    {"format": "mxfp8", "accumulation": 2, "recompute": "full"},
    {"format": "mxfp8", "model": ODD, "overrides": ["fsdp_config.fallback_to_unsharded=true"]},
    {"format": "hif8", "reshard": False},
    {"format": "hif8", "accumulation": 2, "recompute": "full", "model": ODD,
     "overrides": ["fsdp_config.fallback_to_unsharded=true"]},
]  # fmt: skip


@pytest.fixture(scope="module")
def where(corpus, tmp_path_factory):
    return {"corpus": str(corpus), "cache": str(tmp_path_factory.mktemp("cache")), "steps": 2}


def check(answer, case):
    reference, npu = answer["reference"], answer["npu"]
    for field in ("losses", "norms", "masters", "gemms", "replicated"):
        assert npu[field] == reference[field], (field, case)
    assert npu["ledger_ok"] is reference["ledger_ok"] is True
    calls = npu["calls"]
    assert reference["calls"] == {}
    assert calls["npu_quant_matmul"] + calls["npu_grouped_matmul"] >= npu["gemms"] > 0
    assert set(calls) == OPERATORS[case["format"]]
    assert bool(npu["replicated"]) is ("model" in case)
    assert len(set(npu["losses"])) == len(npu["losses"])


@pytest.mark.parametrize("case", ONE_RANK, ids=lambda case: case["format"])
def test_one_rank(case, where):
    with one_rank():
        check(harness_cases.both_backends({**case, **where}), case)


@pytest.mark.slow
def test_two_ranks(where):
    cases = [{**case, **where} for case in TWO_RANKS]
    for case, answer in zip(cases, run_ranks("helpers.npu_harness.cases", "both_backends", cases, ranks=2)):
        check(answer, case)


def test_the_trainer_and_its_ledger(where, tmp_path):
    """A whole run by its config: the same lines of metrics, and the operators' names in the run's ledger."""
    lines, kernels = {}, {}
    for backend in ("reference", "npu"):
        document = micro_document("mxfp8", where["corpus"], where["cache"])
        changes = ["training.steps=2", f"low_precision.backend={backend}"]
        with harness_cases.before_the_harness():
            result = quaver.train(document, changes, out=tmp_path / backend)
        read = [json.loads(line) for line in (result.dir / "metrics.jsonl").read_text().splitlines()]
        lines[backend] = [{k: v for k, v in line.items() if k not in TIMED} for line in read]
        ledger = json.loads((result.dir / "ledger.json").read_text())
        assert ledger["ok"] is True
        kernels[backend] = {entry["kernel"] for entry in ledger["entries"]}
    assert lines["npu"] == lines["reference"]
    assert len(lines["npu"]) == 3
    assert kernels["npu"] == GEMMS
