import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quaver.report.thin import Gap, bucket_means, thin


def test_few_points_are_kept_as_they_are():
    thinned = thin([1, 2, 5], [3.0, 1.0, 2.0], 400)
    assert thinned.stretches == (((1, 3.0), (2, 1.0), (5, 2.0)),)
    assert thinned.gaps == ()


def test_one_spike_and_one_dip_among_many_survive():
    steps = list(range(100_000))
    values = [1.0] * len(steps)
    values[12_345], values[67_890] = 9.0, -9.0
    (points,) = thin(steps, values, 100).stretches
    assert (12_345, 9.0) in points
    assert (67_890, -9.0) in points
    assert points[0] == (0, 1.0)
    assert points[-1] == (99_999, 1.0)
    assert len(points) <= 202


def test_non_finite_values_break_the_line_where_they_are():
    values = [1.0, 2.0, math.nan, 4.0, math.inf, -math.inf, 7.0]
    thinned = thin([10, 20, 30, 40, 50, 60, 70], values, 100)
    assert thinned.stretches == (((10, 1.0), (20, 2.0)), ((40, 4.0),), ((70, 7.0),))
    assert thinned.gaps == (Gap(30, 30, 1, "nan"), Gap(50, 50, 1, "inf"), Gap(60, 60, 1, "-inf"))


def test_non_finite_values_of_one_bucket_are_one_gap():
    steps = list(range(1000))
    values = [math.nan if 500 <= step < 520 else 1.0 for step in steps]
    thinned = thin(steps, values, 10)  # buckets of 100
    assert thinned.gaps == (Gap(500, 519, 20, "nan"),)
    assert len(thinned.stretches) == 2


@given(
    st.lists(st.one_of(st.floats(-1e6, 1e6), st.just(math.nan), st.just(math.inf)), min_size=1, max_size=300),
    st.integers(1, 40),
)
def test_extremes_and_counts_survive_and_size_is_bounded(values, buckets):
    steps = [3 * i for i in range(len(values))]
    thinned = thin(steps, values, buckets)
    points = [point for stretch in thinned.stretches for point in stretch]
    finite = [value for value in values if math.isfinite(value)]
    assert sum(gap.count for gap in thinned.gaps) == len(values) - len(finite)
    assert [step for step, _ in points] == sorted({step for step, _ in points})
    assert all(values[step // 3] == value for step, value in points)
    if finite:
        assert (min(finite), max(finite)) == (min(v for _, v in points), max(v for _, v in points))
    assert len(points) <= 2 * buckets + 2


def test_bucket_means_leave_non_finite_values_out():
    assert bucket_means([0, 1, 2, 3, 4, 5], [1.0, 3.0, math.nan, 5.0, 7.0, 9.0], 2) == [(0, 2.0), (4, 7.0)]
    assert bucket_means([0, 1, 2], [math.nan] * 3, 1) == []
    ((step, mean),) = bucket_means(list(range(101)), [float(i) for i in range(101)], 1)
    assert (step, mean) == (50, pytest.approx(50.0))
