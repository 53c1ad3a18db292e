import math

import numpy as np
import pytest

from quaver.data.shuffle import epoch_keys, permute

MASK = (1 << 64) - 1


def permute_one(index: int, n: int, keys: list[int]) -> int:
    """The definition once more, in Python's whole numbers: what saved cursors rely on."""
    side = math.isqrt(n - 1) + 1 if n > 1 else 1
    while True:
        left, right = divmod(index, side)
        for key in keys:
            x = ((right ^ key) * 0x9E3779B97F4A7C15) & MASK
            x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
            x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
            left, right = right, (left + (x >> 31)) % side
        index = left * side + right
        if index < n:
            return index


@pytest.mark.parametrize("n", [*range(1, 70), 100, 101, 4096, 9999])
def test_each_epoch_visits_each_window_once(n: int) -> None:
    order = permute(np.arange(n), n, epoch_keys(7, "books", 3))
    assert sorted(order.tolist()) == list(range(n))


@pytest.mark.parametrize("n", [1, 2, 3, 17, 4096, 2**31 + 11, 2**45 + 1])
def test_the_order_is_the_one_that_saved_cursors_know(n: int) -> None:
    keys = epoch_keys(1234, "python-stdlib", 0)
    indices = np.unique(np.linspace(0, n - 1, 50).astype(np.int64))
    expected = [permute_one(int(index), n, [int(key) for key in keys]) for index in indices]
    assert permute(indices, n, keys).tolist() == expected


def test_keys_are_pinned() -> None:
    # sha512("quaver order, version 1: 1234 0 python-stdlib"), its first 8 bytes, little-endian
    assert int(epoch_keys(1234, "python-stdlib", 0)[0]) == 0xFDC3A8411F887196


def test_every_window_is_equally_likely_at_every_place() -> None:
    n, seeds = 10, 3000
    places = np.zeros((n, n))
    for seed in range(seeds):
        places[np.arange(n), permute(np.arange(n), n, epoch_keys(seed, "s", 0))] += 1
    expected = seeds / n
    chi2 = ((places - expected) ** 2 / expected).sum()
    # 81 degrees of freedom: mean 81, standard deviation 12.7
    assert 81 - 5 * 12.7 < chi2 < 81 + 5 * 12.7


def test_neighbours_are_torn_apart_and_epochs_and_sources_differ() -> None:
    n = 5000
    orders = [
        permute(np.arange(n), n, epoch_keys(seed, name, epoch))
        for seed, name, epoch in [(1, "a", 0), (1, "a", 1), (2, "a", 0), (1, "b", 0)]
    ]
    for order in orders:
        assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 5 / math.sqrt(n)
        assert abs(np.corrcoef(order, np.arange(n))[0, 1]) < 5 / math.sqrt(n)
    for i in range(4):
        for j in range(i):
            assert (orders[i] == orders[j]).sum() < 10  # one, on average
