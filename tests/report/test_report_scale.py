import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quaver.report.scale import make_scale, short, tick_labels, ticks

finite = st.floats(allow_nan=False, allow_infinity=False, width=32)


def test_ends_map_to_pixels_and_values_between_linearly():
    scale = make_scale([0, 10], 100, 200, pad=0.0)
    assert [scale(value) for value in (0, 2.5, 10, 99)] == [100, 125, 200, 200]


def test_logarithmic_only_where_allowed_positive_and_wide():
    assert make_scale([1, 1000], 0, 1, log=True).log
    assert not make_scale([1, 1000], 0, 1).log
    assert not make_scale([1, 40], 0, 1, log=True).log
    assert not make_scale([0, 1000], 0, 1, log=True).log
    scale = make_scale([1, 10_000], 0, 400, log=True, pad=0.0)
    assert [round(scale(value)) for value in (1, 10, 100, 10_000)] == [0, 100, 200, 400]


def test_round_ticks():
    assert ticks(make_scale([0, 300], 0, 1, pad=0.0), 6) == [0, 50, 100, 150, 200, 250, 300]
    assert ticks(make_scale([1.2, 5.6], 0, 1, pad=0.0)) == [2, 3, 4, 5]
    assert ticks(make_scale([1, 1e6], 0, 1, log=True, pad=0.0)) == pytest.approx([1, 1e2, 1e4, 1e6])
    assert ticks(make_scale([0.9, 60], 0, 1, log=True, pad=0.0)) == pytest.approx([1, 2, 5, 10, 20, 50])


@given(st.lists(finite, min_size=1, max_size=5), st.booleans(), st.booleans())
def test_ticks_lie_inside_are_few_and_told_apart(values, log, zero):
    scale = make_scale(values, 0, 100, log=log, zero=zero)
    found = ticks(scale)
    assert 1 <= len(found) <= 11
    slack = (scale.high - scale.low) * 1e-9
    assert all(scale.low - slack <= value <= scale.high + slack for value in found)
    assert all(0 <= scale(value) <= 100 for value in [*values, *found])
    assert all(math.isfinite(scale(value)) for value in values)
    if max(map(abs, found)) < 1e4 * max(abs(a - b) for a, b in zip([*found, 0.0], [*found[1:], 1.0])):
        assert len(set(tick_labels(found))) == len(found)


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ([0, 50, 100], ["0", "50", "100"]),
        ([1, 1.5, 2], ["1.0", "1.5", "2.0"]),
        ([0, 5e-4, 1e-3], ["0", "5e-4", "1e-3"]),
        ([0, 20_000, 40_000], ["0", "20k", "40k"]),
        ([0, 1000, 2000], ["0", "1000", "2000"]),
        ([-1, 0, 1], ["−1", "0", "1"]),
        ([-1e-3, 0, 1e-3], ["−1e-3", "0", "1e-3"]),
        ([0.1, 1, 10, 100], ["0.1", "1", "10", "100"]),
        ([0, 500_000, 1_000_000], ["0", "0.5M", "1.0M"]),
        ([], []),
    ],
)
def test_tick_labels(values, labels):
    assert tick_labels(values) == labels


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"), (3e-4, "3e-4"), (3.14159, "3.14"), (0.25, "0.25"), (1234, "1,234"), (99_999, "99,999"),
        (614_400, "614k"), (999_999, "1M"), (7_234_560, "7.23M"), (16_585_005_056, "16.6G"), (-2.5, "−2.5"),
        (0.0099999, "0.01"), (-1.5e-7, "−1.5e-7"), (1e20, "1e20"),
        (math.nan, "nan"), (math.inf, "inf"), (-math.inf, "−inf"),
    ],
)  # fmt: skip
def test_short_numbers(value, text):
    assert short(value) == text


@given(finite)
def test_short_numbers_are_short_and_near(value):
    text = short(value)
    assert len(text) <= 9
    factor = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}.get(text[-1], 1.0)
    number = float(text.replace("−", "-").replace(",", "").rstrip("kMGT")) * factor
    assert number == pytest.approx(value, rel=5.1e-3)
