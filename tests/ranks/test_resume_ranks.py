"""Train 12 steps, or stop after 4, resume, stop after 8 and resume again: the same bits, each leg in fresh processes.

In each leg an epoch of a corpus of few windows ends; on the way lie the end of the warm-up, the start of the decay and
two skipped steps, with two micro-batches a step. In one case the first and the last leg save beside the training.
With another number of ranks the loaded state and the first loss of each micro-batch are the same; sums over ranks are
then made in another order, so nothing more is claimed.
The rest of the matrix is `make test-matrix`.
"""

from __future__ import annotations

import itertools
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from helpers.micro import micro_document
from helpers.ranks import run_ranks
from helpers.saved import checkpoint_of, differing, metric_lines, saved_state, saved_tensors

pytestmark = pytest.mark.slow
ALL = [(fmt, ranks) for fmt in ("mxfp8", "hif8", "bf16") for ranks in (1, 2)]
MATRIX = bool(os.environ.get("QUAVER_MATRIX"))
CHOSEN = ALL if MATRIX else [("mxfp8", 2)]
STEPS, STOPS, POISON = 12, (4, 8), (2, 6)
BESIDE = {("mxfp8", 2): ("checkpoint.asynchronous=true",)}  # how the first and the last leg save


def few_documents(folder: Path) -> Path:
    """Fourteen windows of 32 tokens to train on."""
    for number in range(12):
        text = f"Document {number}: " + " ".join(f"{number * k % 97}" for k in range(30, 42)) + ".\n"
        (folder / f"{number:02}.txt").write_text(text)
    return folder


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    corpus = few_documents(tmp_path_factory.mktemp("few"))
    cache = str(tmp_path_factory.mktemp("cache"))

    def leg(fmt: str, ranks: int, out: Path, *overrides: str, start: int = 0, accumulation: int = 2) -> dict:
        document = micro_document(fmt, str(corpus), cache)
        document["gradient_accumulation_steps"] = accumulation
        document["training"] |= {"steps": STEPS, "validate_every": 3}
        document["checkpoint"] = {"every": 2}
        schedule = {"kind": "wsd", "warmup_steps": 4, "decay_ratio": 0.5}
        document["optimizer"] = {"lr": 3e-3, "clip_norm": 0.5, "schedule": schedule}
        case = {
            "document": document,
            "overrides": overrides,
            "out": str(out),
            "resume": start > 0,
            "start": start,
            "poison": POISON,
        }
        (answer,) = run_ranks("resume_cases", "leg", [case], ranks=ranks)
        return answer

    return leg


@pytest.fixture(scope="module")
def runs(make, tmp_path_factory):
    """runs(fmt, ranks) -> an unbroken run, one in three legs, a copy of its folder as the first leg left it."""
    kept: dict[tuple[str, int], dict[str, Any]] = {}

    def made(fmt: str, ranks: int) -> dict[str, Any]:
        if (fmt, ranks) not in kept:
            root = tmp_path_factory.mktemp(f"{fmt}-{ranks}")
            whole, broken, early = root / "whole", root / "broken", root / "early"
            unbroken = make(fmt, ranks, whole)
            beside = BESIDE.get((fmt, ranks), ())
            first = make(fmt, ranks, broken, f"training.stop_after={STOPS[0]}", *beside)
            shutil.copytree(broken, early)
            second = make(fmt, ranks, broken, f"training.stop_after={STOPS[1]}", start=STOPS[0])
            third = make(fmt, ranks, broken, *beside, start=STOPS[1])
            kept[fmt, ranks] = {
                "whole": whole,
                "broken": broken,
                "early": early,
                "unbroken": unbroken,
                "legs": (first, second, third),
            }
        return kept[fmt, ranks]

    return made


@pytest.mark.parametrize(("fmt", "ranks"), CHOSEN)
def test_two_resumes_end_where_the_unbroken_run_ends(runs, fmt: str, ranks: int) -> None:
    run = runs(fmt, ranks)
    unbroken, resumed = run["unbroken"], run["legs"][-1]
    assert (resumed["steps"], resumed["val_loss"]) == (STEPS, unbroken["val_loss"])
    lines = metric_lines(run["whole"])
    assert metric_lines(run["broken"]) == lines
    ends = [saved_tensors(checkpoint_of(run[name], STEPS)) for name in ("whole", "broken")]
    assert differing(*ends) == []
    states = [saved_state(checkpoint_of(run[name], STEPS)) for name in ("whole", "broken")]
    assert states[0]["loader"] == states[1]["loader"]
    assert states[0]["progress"] == states[1]["progress"]
    # what the way was said to hold did happen
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, STEPS + 1))
    assert [line["skipped"] for line in steps] == [0, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2]
    assert [line["step"] for line in lines if "val_loss" in line] == [0, 3, 6, 9, 12]
    rates = [line["lr"] for line in steps]
    assert rates[0] < rates[4] < rates[7] == pytest.approx(3e-3)
    assert rates[-1] < rates[-2] < 3e-3
    assert all(line["grad_norm"] == "inf" or line["grad_norm"] > 0.5 for line in steps), "no clipping"


@pytest.mark.parametrize(("fmt", "ranks"), CHOSEN)
def test_an_epoch_ends_in_each_leg(runs, fmt: str, ranks: int) -> None:
    """Read off the samples themselves: each pass holds every window once, in an order of its own."""
    run = runs(fmt, ranks)
    order = run["unbroken"]["windows"]
    per_step = 2 * 2 * ranks
    assert len(order) == STEPS * per_step
    legs = [leg["windows"] for leg in run["legs"]]
    assert [*itertools.chain(*legs)] == order
    windows = len(set(order))
    passes = [order[start : start + windows] for start in range(0, len(order) - windows + 1, windows)]
    assert all(sorted(one) == sorted(set(order)) for one in passes), "a pass is not every window once"
    assert len({tuple(one) for one in passes}) == len(passes) >= 3
    bounds = [step * per_step for step in (0, *STOPS, STEPS)]
    for start, end in itertools.pairwise(bounds):
        inside = [sample for sample in range(start + 1, end) if sample % windows == 0]
        assert inside, f"no epoch ends between samples {start} and {end}"
        assert end % windows, "a stop on the boundary proves less"
    for name, step in (("early", STOPS[0]), ("broken", STEPS)):
        assert saved_state(checkpoint_of(run[name], step))["loader"]["cursor"] == step * per_step


@pytest.mark.parametrize(("fmt", "ranks"), CHOSEN)
def test_saves_go_on_beside_the_training_where_the_case_says_so(runs, fmt: str, ranks: int) -> None:
    run = runs(fmt, ranks)
    beside = (fmt, ranks) in BESIDE
    for leg, asynchronous in zip(run["legs"], (beside, False, beside)):
        assert leg["beside"] == [asynchronous] * 2
    assert run["unbroken"]["beside"] == [False] * 6


@pytest.mark.parametrize(("fmt", "ranks"), CHOSEN)
def test_no_code_or_scale_is_saved(runs, fmt: str, ranks: int) -> None:
    tensors = saved_tensors(checkpoint_of(runs(fmt, ranks)["whole"], STEPS))
    assert not [key for key in tensors if key.rpartition(".")[2] in ("row_data", "col_data", "data")]
    assert not [key for key in tensors if "scale" in key]
    assert {str(t.dtype) for t in tensors.values()} <= {"torch.bfloat16", "torch.float32", "torch.int64"}


@pytest.mark.parametrize(("fmt", "ranks"), CHOSEN)
def test_another_number_of_ranks_starts_from_the_same_bits(
    make, runs, tmp_path, fmt: str, ranks: int
) -> None:
    """The global batch and the micro-batch stay: twice the ranks make half the micro-steps."""
    run = runs(fmt, ranks)
    other = 3 - ranks
    moved = shutil.copytree(run["early"], tmp_path / "moved")
    answer = make(fmt, other, moved, "training.stop_after=5", start=STOPS[0], accumulation=2 * ranks // other)
    same = run["legs"][1]["first"]
    assert len(same["nats"]) == 2 * ranks
    assert len(set(same["nats"])) > 1
    assert answer["first"] == same
    assert saved_state(checkpoint_of(moved, 5))["world_size"] == other
