"""A permutation that is computed, not stored: where sample i of an epoch lies.

A small Feistel network over a grid of side ceil(sqrt(n)), with indices that fall outside [0, n) sent through
again (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002): any position of any epoch
costs the same handful of array operations, nothing has to be kept for a resume, and the order does not hang
on the version of a random generator. Not cryptography: the rounds only mix well. May import numpy.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
import numpy.typing as npt

_ROUNDS = 8


def epoch_keys(seed: int, name: str, epoch: int) -> npt.NDArray[np.uint64]:
    """The round keys of one source's epoch, uint64 [rounds]."""
    digest = hashlib.sha512(f"quaver order, version 1: {seed} {epoch} {name}".encode()).digest()
    return np.frombuffer(digest, dtype="<u8")[:_ROUNDS].astype(np.uint64)


def permute(indices: npt.NDArray[np.int64], n: int, keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """Maps `indices` (each in [0, n)) through a permutation of [0, n) that `keys` choose."""
    side = np.uint64(math.isqrt(n - 1) + 1) if n > 1 else np.uint64(1)
    values = _network(indices.astype(np.uint64), side, keys)
    outside = np.flatnonzero(values >= n)
    while outside.size:  # a permutation of the grid's side^2 >= n cells: following it comes back into [0, n)
        values[outside] = _network(values[outside], side, keys)
        outside = outside[values[outside] >= n]
    return values.astype(np.int64)


def _network(
    values: npt.NDArray[np.uint64], side: np.uint64, keys: npt.NDArray[np.uint64]
) -> npt.NDArray[np.uint64]:
    left, right = values // side, values % side
    for key in keys:  # each round adds to one half what depends on the other alone, so it can be undone
        left, right = right, (left + _mix(right, key)) % side
    return left * side + right


def _mix(values: npt.NDArray[np.uint64], key: np.uint64) -> npt.NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014); shifted so that a sum cannot overflow."""
    mixed = (values ^ key) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed >> np.uint64(31)
