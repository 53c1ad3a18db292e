"""Four ranks and 2x2 replicas within rounding; weights whose shards cut blocks; weights that cannot be sharded."""

import hashlib
import json
import math
import os
from pathlib import Path

import pytest
import torch
from helpers.micro import micro_document
from helpers.ranks import run_ranks
from helpers.saved import checkpoint_of, differing, saved_tensors
from torch.distributed.checkpoint import FileSystemReader

MATRIX = pytest.mark.skipif(not os.environ.get("QUAVER_MATRIX"), reason="part of `make test-matrix`")


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


STOP, STEPS = 2, 3
WHOLE = {  # no dimension of 64 rows or 4 experts divides by 3 ranks
    "model.layers.0.self_attn.q_proj.weight": [64, 64],
    "model.layers.1.mlp.experts.gate_up_proj": [4, 96, 64],
    "model.layers.1.mlp.experts.down_proj": [4, 64, 48],
}


@pytest.fixture(scope="module")
def three(corpus, tmp_path_factory):
    """Three ranks whose weights do not divide: refused, whole on each rank, and saved and resumed at 3 and 1 ranks."""
    root = tmp_path_factory.mktemp("three")
    shared = {"corpus": str(corpus), "cache": str(root / "cache")}
    formats = ("mxfp8", "hif8")
    whole = [
        {
            **shared,
            "format": f,
            "ranks": 3,
            "steps": 3,
            "overrides": ["fsdp_config.fallback_to_unsharded=true"],
        }
        for f in formats
    ]
    kept = []
    for f in formats if os.environ.get("QUAVER_MATRIX") else formats[:1]:
        document = micro_document(f, str(corpus), shared["cache"])
        document["fsdp_config"] = {"fallback_to_unsharded": True}
        document["training"]["steps"] = STEPS
        document["checkpoint"] = {"every": 1}
        folders = {name: str(root / f"{f}-{name}") for name in ("whole", "broken", "early")}
        kept.append({"format": f, "document": document, "overrides": [], "stop": STOP, **folders})
    cases = [{"do": "train_or_refuse", **case} for case in ({**shared, "format": "mxfp8"}, *whole)]
    cases += [{"do": "unbroken_and_resumed", **case} for case in kept]
    refused, *answers = run_ranks("resume_cases", "one_of", cases, ranks=3)
    cases = [{"do": "reference_case", **case} for case in whole]
    for case in kept:  # one rank takes the micro-batches of three
        case = {**case, "document": {**case["document"], "gradient_accumulation_steps": 3}}
        cases.append({"do": "leg", **case, "out": case["early"], "start": STOP, "resume": True})
    alone = run_ranks("resume_cases", "one_of", cases, ranks=1)
    n = len(whole)
    return {
        "refused": refused,
        "trained": list(zip(alone[:n], answers[:n])),
        "resumed": list(zip(kept, alone[n:], answers[n:])),
    }


@pytest.mark.slow
def test_three_ranks_refuse_by_name_or_keep_weights_whole(three) -> None:
    error = three["refused"]["error"]
    assert "model.layers.0.self_attn.q_proj.weight" in error
    assert "64 rows do not divide by 3 ranks" in error
    assert "fallback_to_unsharded" in error
    for one, several in three["trained"]:
        assert set(WHOLE) <= set(several["replicated"])
        assert several["ledger_ok"] is True
        assert several["gemms"] * 3 == one["gemms"]  # every rank runs its own third, all in eight bits
        assert relative(one["losses"], several["losses"]) <= 1e-5
        assert several["plain_keys"] is True


@pytest.mark.slow
def test_whole_weights_are_saved_as_ordinary_parameters(three) -> None:
    """FP32 under Hugging Face's names, each once; 3 ranks go on from them to the unbroken run's bits, and one rank
    starts from the same state and the same losses."""
    for case, one, several in three["resumed"]:
        early = checkpoint_of(Path(case["early"]), STOP)
        tensors = saved_tensors(early)
        replicated = json.loads((Path(case["whole"]) / "environment.json").read_text())["replicated"]
        assert set(WHOLE) <= set(replicated)
        stored = FileSystemReader(early).read_metadata().state_dict_metadata
        for fqn in replicated:
            master, logical = tensors[f"optim.{fqn}.master"], tensors[f"model.{fqn}"]
            assert type(master) is torch.Tensor
            assert (master.dtype, logical.dtype) == (torch.float32, torch.bfloat16)
            assert list(master.shape) == WHOLE.get(fqn, list(master.shape))
            assert torch.equal(master.bfloat16(), logical)
            assert [chunk.sizes for chunk in stored[f"optim.{fqn}.master"].chunks] == [master.shape]
        assert len(stored["optim.model.embed_tokens.weight.master"].chunks) == 3, "nothing was sharded"
        assert not [key for key in tensors if "scale" in key or "data" in key]
        saved = {
            name: hashlib.sha256(t.numpy().tobytes()).hexdigest()
            for name, t in tensors.items()
            if name.startswith("optim.")
        }
        assert one["first"] == several["first"]
        held = several["first"]["masters"]
        assert held == {fqn: saved[f"optim.{fqn}.master"] for fqn in held}
        moments = {k: saved["optim.{1}.{0}".format(*k.split(".", 1))] for k in several["first"]["moments"]}
        assert several["first"]["moments"] == moments
        assert len(moments) == 2 * len(held)
        ends = [saved_tensors(checkpoint_of(Path(case[name]), STEPS)) for name in ("whole", "broken")]
        assert differing(*ends) == []
        assert differing(ends[0], tensors) != []
        assert one["steps"] == several["steps"] == STEPS
