"""Known answers computed by hand from the documented formula."""

import math
from itertools import pairwise

import pytest

from quaver.errors import ConfigError
from quaver.optim import learning_rate, warmup_steps_from_ratio


def rates(total, **keys):
    return [learning_rate(step, total_steps=total, **keys) for step in range(total)]


def test_warm_up_is_linear_and_reaches_the_peak_at_its_end():
    got = rates(8, lr=1.0, kind="constant", warmup_steps=4)
    assert got == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0, 1.0, 1.0], abs=0)


def test_cosine_known_answers():
    got = rates(4, lr=2.0, kind="cosine", final_ratio=0.0)
    # 2 * (1 + cos(k * 45 degrees)) / 2
    assert got == pytest.approx([2.0, 1.0 + math.sqrt(0.5), 1.0, 1.0 - math.sqrt(0.5)], rel=1e-15)
    # with a floor: halfway between peak and floor at half time
    assert learning_rate(50, total_steps=100, lr=1.0, kind="cosine", final_ratio=0.1) == pytest.approx(0.55)


def test_linear_known_answers_with_warm_up():
    got = rates(6, lr=1.0, kind="linear", warmup_steps=2, final_ratio=0.2)
    assert got == pytest.approx([1 / 3, 2 / 3, 1.0, 0.8, 0.6, 0.4], rel=1e-15)


def test_wsd_is_flat_and_then_decays_over_its_last_share():
    got = rates(10, lr=1.0, kind="wsd", warmup_steps=1, final_ratio=0.0, decay_ratio=0.4)
    assert got == pytest.approx([0.5, 1, 1, 1, 1, 1, 1.0, 0.75, 0.5, 0.25], rel=1e-15)


@pytest.mark.parametrize("kind", ["cosine", "linear", "wsd"])
def test_step_after_the_last_is_the_final_rate_and_no_step_rises_after_warm_up(kind):
    keys = {"lr": 3e-4, "kind": kind, "warmup_steps": 7, "final_ratio": 0.1}
    assert learning_rate(100, total_steps=100, **keys) == pytest.approx(3e-5)
    got = rates(100, **keys)
    assert max(got) == got[7] == 3e-4
    assert all(a >= b for a, b in pairwise(got[7:]))
    assert all(a < b for a, b in pairwise(got[:8]))


def test_warm_up_ratio_rounds_up_the_decimal_that_was_written():
    assert warmup_steps_from_ratio(0.1, 30) == 3  # 0.1 * 30 is 3.0000000000000004 in binary
    assert warmup_steps_from_ratio(0.1, 2000) == 200
    assert warmup_steps_from_ratio(0.03, 10) == 1
    assert warmup_steps_from_ratio(0.0, 10) == 0


@pytest.mark.parametrize(
    ("keys", "where"),
    [
        ({"kind": "cosin"}, "optimizer.schedule.kind"),
        ({"step": -1}, "training.steps"),
        ({"step": 11}, "training.steps"),
        ({"total_steps": 0}, "training.steps"),
        ({"warmup_steps": 11}, "optimizer.schedule"),
        ({"kind": "wsd", "warmup_steps": 9, "decay_ratio": 0.2}, "optimizer.schedule"),
        ({"kind": "wsd", "decay_ratio": 1.5}, "optimizer.schedule.decay_ratio"),
        ({"final_ratio": 1.5}, "optimizer.schedule.final_ratio"),
    ],
)
def test_impossible_schedules_are_errors(keys, where):
    arguments = {"step": 0, "total_steps": 10, "lr": 1.0, "kind": "cosine", **keys}
    with pytest.raises(ConfigError) as caught:
        learning_rate(arguments.pop("step"), **arguments)
    assert where in caught.value.where


def test_bad_ratio_is_an_error():
    with pytest.raises(ConfigError, match="warmup ratio"):
        warmup_steps_from_ratio(1.01, 10)
