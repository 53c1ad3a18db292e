"""Turns, ratios and medians, under a clock of the test's own: no assertion here knows what time it is."""

from __future__ import annotations

import pytest

from quaver.bench.comparison import Comparison, Group
from quaver.bench.loop import with_lost
from quaver.bench.sizes import Sizes
from quaver.bench.timing import MOST_REPEATS, Spread, Turn, spread, take_turns
from quaver.errors import QuaverError


class Clock:
    """Time passes only when a contestant says so."""

    def __init__(self) -> None:
        self.now = 0.0
        self.order: list[str] = []

    def __call__(self) -> float:
        return self.now

    def contestant(self, name: str, seconds: list[float], units: int | None = None):
        left = iter(seconds)

        def run() -> int | None:
            self.order.append(name)
            self.now += next(left)
            return units

        return run


def test_turns_alternate_and_reverse() -> None:
    clock = Clock()
    contestants = {name: clock.contestant(name, [1.0] * 9) for name in "abc"}
    take_turns(contestants, 3, clock=clock, leads_in=False)
    warm, rounds = clock.order[:6], clock.order[6:]
    assert warm == ["a", "a", "b", "b", "c", "c"]
    assert rounds == list("abccbaabc")


def test_each_round_has_its_own_times_and_warming_up_counts_nowhere() -> None:
    clock = Clock()
    contestants = {
        "ours": clock.contestant("ours", [90.0, 70.0, 1.0, 2.0, 3.0]),
        "other": clock.contestant("other", [80.0, 60.0, 2.0, 2.0, 4.0]),
    }
    seen: list[int] = []
    times = take_turns(contestants, 3, clock=clock, on_round=seen.append, leads_in=False)
    assert [t["ours"].per_unit for t in times] == pytest.approx([1.0, 2.0, 3.0])
    assert [t["other"].per_unit for t in times] == pytest.approx([2.0, 2.0, 4.0])
    assert seen == [1, 2, 3]


def test_a_short_contestant_is_repeated_and_its_time_divided() -> None:
    clock = Clock()
    short = clock.contestant("short", [0.01] * 100)
    times = take_turns({"short": short}, 2, clock=clock, shortest=0.05)
    repeats = (len(clock.order) - 2) / 2 - 1
    assert 5 <= repeats <= 6
    assert [t["short"].per_unit for t in times] == pytest.approx([0.01, 0.01])
    assert [t["short"].runs for t in times] == [repeats, repeats]


def test_a_contestant_that_takes_no_time_is_not_repeated_for_ever() -> None:
    clock = Clock()
    take_turns({"nothing": clock.contestant("nothing", [0.0] * 5000)}, 1, clock=clock)
    assert len(clock.order) == 3 + MOST_REPEATS  # two to warm up, one that leads in


def test_what_a_short_contestant_finds_of_the_one_before_is_not_its_time() -> None:
    clock = Clock()
    short = clock.contestant("short", [0.5, 0.5, 0.9, 0.5, 0.9, 0.5])  # slow whenever its turn begins
    long = clock.contestant("long", [2.0] * 6)
    times = take_turns({"short": short, "long": long}, 2, clock=clock)
    assert [t["short"].per_unit for t in times] == pytest.approx([0.5, 0.5])
    assert clock.order == ["short"] * 2 + ["long"] * 2 + (["short"] * 2 + ["long"] * 4 + ["short"] * 2)


def test_long_contestants_lead_in_too() -> None:
    """Else a contestant that crosses some limit would change its figure by what it finds of the one before."""
    clock = Clock()
    times = take_turns({"long": clock.contestant("long", [5.0, 5.0, 9.0, 5.0, 9.0, 5.0])}, 2, clock=clock)
    assert [t["long"].per_unit for t in times] == pytest.approx([5.0, 5.0])


def test_times_are_for_a_unit_of_work() -> None:
    clock = Clock()
    (times,) = take_turns({"steps": clock.contestant("steps", [12.0] * 4, units=4)}, 1, clock=clock)
    assert times["steps"] == Turn(12.0, 1, 4)
    assert times["steps"].per_unit == pytest.approx(3.0)


def test_a_turn_has_its_own_runs_and_units_when_it_repeats() -> None:
    """The units of untimed runs are none of its, and a run may do other work than the one before."""
    clock, done = Clock(), iter([9, 9, 9, 1, 2, 3, 9, 4, 5, 6])

    def work() -> int:
        clock.now += 0.02
        return next(done)

    times = take_turns({"work": work}, 2, clock=clock, shortest=0.05)
    assert [(t["work"].runs, t["work"].units) for t in times] == [(3, 6), (3, 15)]


def test_what_a_save_costs_is_for_one_save_however_many_a_turn_holds() -> None:
    plain = Turn(seconds=5.0, runs=1, units=5)
    one = with_lost(Turn(seconds=12.0, runs=1, units=10), plain)
    three = with_lost(Turn(seconds=36.0, runs=3, units=30), plain)
    assert one["lost"] == pytest.approx(2.0)
    assert three == pytest.approx(one)


def test_spread_of_even_and_odd_numbers_of_rounds() -> None:
    assert spread([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)
    assert spread([1.0, 4.0, 2.0, 3.0]) == Spread(2.5, 1.0, 4.0)


def test_the_ratio_is_the_median_of_ratios_and_not_the_ratio_of_medians() -> None:
    times = [{"a": 1.0, "b": 1.0}, {"a": 10.0, "b": 2.0}, {"a": 3.0, "b": 30.0}]
    comparisons = (
        Comparison("x", "a", "b", 1.0, "a over b"),
        Comparison("y", "b", "a", 0.5, "b over a"),
        Comparison("z", "a", "b", None, "no target"),
    )
    asked: list[object] = []

    def rounds(sizes, needed, pairs, on_round):
        asked.append((sizes, needed, pairs))
        return times

    sizes = Sizes(tokens=8)
    x, y, z = Group("g", comparisons, rounds).run(sizes, 3, lambda _: None)
    assert asked == [(sizes, frozenset({"a", "b"}), 3)]
    assert (x.ratio, x.min, x.max, x.pairs) == (1.0, 0.1, 5.0, 3)  # medians of the times would give 3 / 2
    assert (y.ratio, y.min, y.max) == (1.0, 0.2, 10.0)
    assert (x.met, y.met, z.met) == (True, False, None)
    assert x.to_json() == {
        "name": "x", "ratio": 1.0, "target": 1.0, "pairs": 3, "min": 0.1, "max": 5.0, "met": True,
        "what": "a over b", "seconds": (3.0, 2.0),
    }  # fmt: skip


def test_a_group_that_ends_before_its_rounds_has_no_figures() -> None:
    group = Group("g", (Comparison("x", "a", "b", 1.0, "a over b"),), lambda *_: [{"a": 1.0, "b": 1.0}] * 2)
    with pytest.raises(QuaverError, match="2 rounds were measured where 3 were asked for") as caught:
        group.run(Sizes(tokens=8), 3, lambda _: None)
    assert caught.value.exit_code == 3
    assert caught.value.where == "the group g"
