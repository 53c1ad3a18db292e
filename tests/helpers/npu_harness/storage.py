"""How scales lie in the NPU's memory, written out element by element, and how a view says that it is transposed."""

from __future__ import annotations

from itertools import pairwise

import torch

from helpers.npu_harness.refusal import want

BLOCK, PAIR = 32, 64


def ceil(length: int, size: int) -> int:
    """Pieces of a size that cover a length."""
    return -(-length // size)


def pairs(scale: torch.Tensor, axis: int) -> torch.Tensor:
    """Single scales -> pairs along a negative axis: element b goes to [b // 2, ..., b % 2]; the rest is 0."""
    shape = [*scale.shape, 2]
    shape[axis - 1] = ceil(scale.shape[axis], 2)
    out = scale.new_zeros(shape)
    for block in range(scale.shape[axis]):
        out.select(-1, block % 2).select(axis, block // 2).copy_(scale.select(axis, block))
    return out


def singles(packed: torch.Tensor, axis: int, blocks: int) -> torch.Tensor:
    """The way back; `axis` is the negative axis of the result. What no block fills must be scale 0."""
    spare = packed.select(axis - 1, -1).select(-1, 1) if blocks % 2 else packed[:0]
    want(not bool(spare.any()), "a scale that belongs to no block is not 0")
    parts = [packed.select(-1, block % 2).select(axis, block // 2) for block in range(blocks)]
    return torch.stack(parts, axis)


def group_places(ends: list[int]) -> list[tuple[int, int]]:
    """(row, side) of each block of each group, in order: group g starts at row start // 64 + g."""
    places = []
    for group, (start, end) in enumerate(pairwise([0, *ends])):
        first = start // PAIR + group
        places += [(first + block // 2, block % 2) for block in range(ceil(end - start, BLOCK))]
    return places


def group_pairs(scale: torch.Tensor, ends: list[int]) -> torch.Tensor:
    """[blocks of all groups, K] -> [S // 64 + G, K, 2]."""
    out = scale.new_zeros((ends[-1] // PAIR + len(ends), scale.shape[1], 2))
    for index, (row, side) in enumerate(group_places(ends)):
        out[row, :, side] = scale[index]
    return out


def group_singles(packed: torch.Tensor, ends: list[int]) -> torch.Tensor:
    """The way back. What no block fills must be scale 0."""
    spare = packed.clone()
    for row, side in group_places(ends):
        spare[row, :, side] = 0
    want(not bool(spare.any()), "a scale that belongs to no block of its group is not 0")
    rows = [packed[row, :, side] for row, side in group_places(ends)]
    return torch.stack(rows) if rows else packed.new_zeros((0, packed.shape[1]))


def transposed(matrix: torch.Tensor, scale: torch.Tensor | None = None) -> bool:
    """Whether a matrix [..., R, C] is the transposed view of a dense one; its scale [..., r, c, 2] must agree."""
    states = _states(matrix, -1)
    if scale is not None:
        both = states & _states(scale, -2)
        want(bool(both), f"matrix with strides {matrix.stride()}, scale with {scale.stride()}: one is transposed")
        states = both
    return states == {True}


def _states(tensor: torch.Tensor, axis: int) -> set[bool]:
    found = {False} if tensor.is_contiguous() else set()
    if tensor.transpose(axis, axis - 1).is_contiguous():
        found.add(True)
    want(bool(found), f"strides {tensor.stride()} of {tuple(tensor.shape)} are neither plain nor transposed")
    return found
