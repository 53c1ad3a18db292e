from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from quaver.data.interleave import Interleave
from quaver.errors import ConfigError


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6))
# Found by search: giving to the source furthest behind is off by 1.02 samples here.
@example([3, 3, 17, 31, 31, 35])
@settings(max_examples=80, deadline=None)
def test_every_prefix_holds_the_shares_to_within_one_sample(weights: list[int]) -> None:
    interleave = Interleave([float(weight) for weight in weights])
    length = 2 * interleave.period + 3
    sources, _ = interleave.place(np.arange(length))
    for source, weight in enumerate(weights):
        share = Fraction(weight, sum(weights))
        counts = np.cumsum(sources == source)
        assert all(abs(int(count) - share * (t + 1)) < 1 for t, count in enumerate(counts))


@given(st.lists(st.sampled_from([0.1, 0.25, 1.0, 2.5, 3.0]), min_size=1, max_size=4), st.integers(0, 10**12))
@settings(max_examples=50, deadline=None)
def test_each_source_gives_its_samples_in_order_from_any_position(weights: list[float], start: int) -> None:
    interleave = Interleave(weights)
    everything = np.arange(start, start + 60)
    sources, numbers = interleave.place(everything)
    for source in range(len(weights)):
        own = numbers[sources == source]
        assert (np.diff(own) == 1).all()
    alone = [tuple(int(part[0]) for part in interleave.place(everything[i : i + 1])) for i in range(60)]
    assert alone == list(zip(sources.tolist(), numbers.tolist(), strict=True))


def test_one_half_and_two_quarters_alternate() -> None:
    sources, numbers = Interleave([2.0, 1.0, 1.0]).place(np.arange(8))
    assert np.bincount(sources[:4]).tolist() == [2, 1, 1]
    assert sources[:4].tolist() == sources[4:].tolist()
    assert (sources[:-1] != sources[1:]).all()
    assert numbers[sources == 0].tolist() == [0, 1, 2, 3]


def test_decimals_mean_what_they_print_as() -> None:
    assert Interleave([0.7, 0.2, 0.1]).period == 10
    assert Interleave([0.5, 0.25]).period == 3


def test_shares_without_a_short_period_are_refused_with_rounded_ones() -> None:
    with pytest.raises(ConfigError, match=r"repeat only after") as caught:
        Interleave([1234567.0, 7654321.0])
    assert "0.139, 0.861" in str(caught.value)
    assert Interleave([0.139, 0.861]).period == 1000
