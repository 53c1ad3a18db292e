"""Each collective of a step at two ranks is the computed one: kind, dtype, bytes; nothing planned goes over in FP32."""

from collections import Counter

import pytest
from helpers.ranks import run_ranks

pytestmark = pytest.mark.slow
WEIGHT = "model.layers.1.self_attn.q_proj.weight"  # [64, 64]: a rank holds 32 rows, 2048 elements


def surplus(found: list, computed: list) -> list:
    """Events that one list has and the other has not, with how many times."""
    counts = Counter(map(str, found))
    counts.subtract(Counter(map(str, computed)))
    return sorted((event, times) for event, times in counts.items() if times)


@pytest.fixture(scope="module")
def answers(case):
    """The honest cases, two hostile ones and one of swapped fields, in one start of the ranks."""
    honest = [case(format=f, reshard=r) for f in ("mxfp8", "hif8", "bf16") for r in (True, False)]
    honest.append(case(format="mxfp8", accumulation=2, model={"intermediate_size": 144}))
    hostile = [
        case(format=f, hostile={"weight": WEIGHT, "dtype": d})
        for f, d in (("mxfp8", "float32"), ("hif8", "bfloat16"))
    ]
    runs = [*honest, *hostile, case(format="mxfp8", reshard=False, swap=True)]
    return list(zip(runs, run_ranks("bytes_cases", "bytes_case", runs, ranks=2)))


def test_every_collective_of_a_step_is_the_computed_one(answers) -> None:
    seen = 0
    for run, answer in answers:
        if "hostile" in run or "swap" in run:
            continue
        seen += 1
        for step in answer["steps"]:
            assert surplus(step, answer["computed"]) == [], run
        for kind, _, size, parts in answer["computed"]:
            assert not parts or (kind == "all_gather" and sum(parts.values()) == size), run
        assert answer["freed_after_forward"] is run.get("reshard", True), run
        assert answer["local_alive"] is True, run
    assert seen == 7


def test_what_planned_weights_send_is_codes_and_scales_alone(answers) -> None:
    """High precision in the gathers of a layer is that of its norms."""
    for run, answer in answers:
        if "hostile" in run or "swap" in run or run["format"] == "bf16":
            continue
        for step in answer["steps"]:
            packed = [parts for *_, parts in step if "uint8" in parts]
            assert packed
            # input, post-attention and kv_a norms: (64 + 64 + 32) / 2 elements of two bytes
            assert {parts["bfloat16"] for parts in packed} == {160}
            assert all(parts.get("float32", 0) <= 100 for parts in packed)  # HiF8's scales


def test_a_planned_weight_gathered_in_high_precision_is_seen(answers) -> None:
    hostile = [(run, answer) for run, answer in answers if "hostile" in run]
    assert len(hostile) == 2
    for run, answer in hostile:  # one event more, and that is the one
        dtype = run["hostile"]["dtype"]
        size = {"float32": 4, "bfloat16": 2}[dtype] * 2048
        for step in answer["steps"]:
            assert surplus(step, answer["computed"]) == [(str(["all_gather", dtype, size, {}]), 1)]


def test_a_first_gather_is_held_against_what_was_sent_and_no_later_one(answers) -> None:
    """Per weight and set of fields; again only while both directions' codes are equal, which tells no order."""
    for run, answer in answers:
        if "swap" in run:
            continue
        sets = 2 if run["format"] == "mxfp8" and run.get("reshard", True) else 1
        assert len(answer["looks"]) == sets * answer["planned"], run
        assert answer["planned"] == 0 if run["format"] == "bf16" else answer["planned"] > 20
        for where, settled in answer["looks"].items():
            assert not any(settled[:-1]), (run, where)
            assert len(settled) <= 2, (run, where)
        at_once = sum(settled == [True] for settled in answer["looks"].values())
        assert at_once >= 0.8 * len(answer["looks"]), run


def test_fields_in_each_others_place_are_refused_by_name(answers) -> None:
    (told,) = [answer["swap"] for run, answer in answers if "swap" in run]
    assert told.startswith("GatherError: rank 0's own part of the gathered row_data is its col_data")
    assert "where: model.layers." in told
