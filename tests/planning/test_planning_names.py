"""Collapsed names: known answers, and the matcher as the judge that nothing is lost and nothing added."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quaver.planning import collapse
from quaver.planning.names import ranges
from quaver.surgery import match


@pytest.mark.parametrize(
    ("fqns", "wanted"),
    [
        ([], []),
        (["lm_head"], ["lm_head"]),
        ([f"layers.{i}.q" for i in range(28)], ["layers.{0-27}.q"]),
        (["l.3.q", "l.0.q", "l.1.q", "l.7.q"], ["l.{0-1,3,7}.q"]),
        (["l.0.a", "l.0.b", "l.1.a", "l.1.b"], ["l.{0-1}.a", "l.{0-1}.b"]),
        (["a.0.b.0", "a.0.b.1", "a.1.b.0", "a.1.b.1"], ["a.{0-1}.b.{0-1}"]),
        (["a.0.b.0", "a.0.b.1", "a.1.b.0"], ["a.0.b.{0-1}", "a.1.b.0"]),
        (["l.0", "l.1.x", "l.2"], ["l.{0,2}", "l.1.x"]),
        (["l.07", "l.7", "l.8"], ["l.07", "l.{7-8}"]),
        (["l.1", "l.1"], ["l.1"]),
    ],
)
def test_known_answers(fqns: list[str], wanted: list[str]) -> None:
    assert collapse(fqns) == wanted


def test_ranges() -> None:
    assert ranges([3]) == "3"
    assert ranges([2, 0, 1, 9, 5, 4]) == "{0-2,4-5,9}"


COMPONENT = st.one_of(st.integers(0, 4).map(str), st.sampled_from(["a", "b", "01"]))
FQNS = st.lists(st.lists(COMPONENT, min_size=1, max_size=4).map(".".join), max_size=30)


@given(FQNS)
def test_every_name_is_matched_once_and_no_other(fqns: list[str]) -> None:
    """Judged by the one matcher, over the given names and all of up to three components."""
    alphabet = [*map(str, range(5)), "a", "b", "01"]
    everything = {".".join(name) for size in (1, 2, 3) for name in itertools.product(alphabet, repeat=size)}
    everything |= set(fqns)
    matched = [name for pattern in collapse(fqns) for name in match(pattern, sorted(everything))]
    assert sorted(matched) == sorted(set(fqns))
