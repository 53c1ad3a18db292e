import hashlib

import numpy as np
import pytest

from quaver.data.split import SALT, choose_validation, document_number
from quaver.errors import ConfigError

TEXTS = [f"text {number}" for number in range(2000)]


def numbers(*texts: str) -> np.ndarray:
    return np.array([document_number(text) for text in texts], dtype=np.uint64)


def test_a_document_validates_by_the_hash_of_its_text_alone() -> None:
    (mask,) = choose_validation([numbers(*TEXTS)], 0.1)
    expected = [
        int(hashlib.sha256((SALT + text).encode()).hexdigest()[:16], 16) / 2**64 < 0.1 for text in TEXTS
    ]
    assert mask.tolist() == expected
    assert 160 < mask.sum() < 240  # 200 expected, standard deviation 13.4


def test_adding_documents_and_order_move_no_other() -> None:
    (few,) = choose_validation([numbers(*TEXTS[:500])], 0.1)
    (many,) = choose_validation([numbers(*TEXTS[::-1])], 0.1)
    assert many[::-1][:500].tolist() == few.tolist()


def test_equal_texts_stand_on_one_side_in_every_source() -> None:
    sources = [[*TEXTS, *TEXTS], TEXTS[:100], TEXTS[50:51]]
    masks = choose_validation([numbers(*texts) for texts in sources], 0.3)
    sides: dict[str, set[bool]] = {}
    for texts, mask in zip(sources, masks, strict=True):
        for text, validates in zip(texts, mask.tolist(), strict=True):
            sides.setdefault(text, set()).add(validates)
    assert all(len(side) == 1 for side in sides.values())
    assert sides[TEXTS[50]] == {False}  # the only document of the third source


@pytest.mark.parametrize("fraction", [1e-9, 0.05, 0.5, 0.999999])
def test_two_documents_are_enough_whatever_the_fraction(fraction: float) -> None:
    (mask,) = choose_validation([numbers("a", "b")], fraction)
    assert sorted(mask.tolist()) == [False, True]
    assert mask.tolist() == [
        document_number("a") < document_number("b"),
        document_number("b") < document_number("a"),
    ]


def test_each_source_keeps_a_training_document() -> None:
    masks = choose_validation([numbers("alone"), numbers("a", "b"), numbers("c", "d")], 0.999)
    assert [int((~mask).sum()) for mask in masks] == [1, 1, 1]


@pytest.mark.parametrize("parts", [[["a"]], [["a", "a", "a"]], [["a"], ["b"]], [["a", "a"], ["a"]]])
def test_nothing_left_to_validate_is_an_error(parts: list[list[str]]) -> None:
    with pytest.raises(ConfigError, match="none is left for validation") as caught:
        choose_validation([numbers(*part) for part in parts], 0.5)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, float("nan")])
def test_a_fraction_outside_0_and_1_is_an_error(fraction: float) -> None:
    with pytest.raises(ConfigError, match="not between 0 and 1"):
        choose_validation([numbers("a", "b")], fraction)
