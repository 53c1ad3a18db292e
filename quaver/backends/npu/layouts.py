"""Between the scale layouts of the contract and those of the NPU: pairs of 32-element scales stand side by side.

    blocks along      contract                     NPU
    the last axis     [..., M, ceil(K/32)]         [..., M, ceil(K/64), 2]
    the axis before   [..., ceil(M/32), K]         [..., ceil(M/64), K, 2]      [i, k, j] is block 2i + j
    grouped tokens    [sum of ceil(n_e/32), K]     [S//64 + E, K, 2]            group e from row start_e//64 + e

An odd number of blocks is filled up with scale 0. Weights are gathered in the contract's layout and packed here,
after the gather, so shards of 352 rows need no care. All on uint8, any device. May import: torch, tags.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F

from quaver.backends.npu.tags import BLOCK, PAIR


def pack_last(scale: torch.Tensor) -> torch.Tensor:
    """[..., n] -> [..., ceil(n/2), 2]; a view where n is even and the scale contiguous."""
    odd = scale.shape[-1] % 2
    return (F.pad(scale, (0, 1)) if odd else scale).contiguous().unflatten(-1, (-1, 2))


def unpack_last(packed: torch.Tensor, length: int) -> torch.Tensor:
    """[..., pairs, 2] -> [..., ceil(length/32)]: drops the filling of `length` elements."""
    return packed.flatten(-2)[..., : _blocks(length)].contiguous()


def pack_before(scale: torch.Tensor) -> torch.Tensor:
    """[..., n, K] -> [..., ceil(n/2), K, 2]."""
    odd = scale.shape[-2] % 2
    return (F.pad(scale, (0, 0, 0, 1)) if odd else scale).unflatten(-2, (-1, 2)).transpose(-1, -2).contiguous()


def unpack_before(packed: torch.Tensor, length: int) -> torch.Tensor:
    """[..., pairs, K, 2] -> [..., ceil(length/32), K]."""
    return packed.transpose(-1, -2).flatten(-3, -2)[..., : _blocks(length), :].contiguous()


def pack_groups(scale: torch.Tensor, ends: list[int]) -> torch.Tensor:
    """[sum of ceil(n_e/32), K] -> [S//64 + E, K, 2]; rows between groups hold scale 0."""
    rows = (ends[-1] if ends else 0) // PAIR + len(ends)
    flat = scale.new_zeros((2 * rows, scale.shape[1]))
    flat.index_copy_(0, _group_rows(ends, scale.device), scale)
    return flat.unflatten(0, (rows, 2)).transpose(1, 2).contiguous()


def unpack_groups(packed: torch.Tensor, ends: list[int]) -> torch.Tensor:
    """[S//64 + E, K, 2] -> [sum of ceil(n_e/32), K]."""
    return packed.transpose(1, 2).flatten(0, 1).index_select(0, _group_rows(ends, packed.device))


def left_operand(matrix: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(matrix, packed scale) of a left operand [..., M, K] whose scale [..., M, ceil(K/32)] runs along K.

    The two share their state: a transposed view (of codes stored [K, M]) comes with a scale that is the transposed
    view of [ceil(K/64), M, 2].
    """
    matrix = _dense(matrix)
    if _is_transposed(matrix):
        return matrix, pack_before(scale.transpose(-1, -2)).transpose(-3, -2)
    return matrix, pack_last(scale)


def right_operand(matrix: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(matrix, packed scale) of a right operand [..., K, N] whose scale [..., ceil(K/32), N] runs along K.

    A transposed view (of codes stored [N, K]) comes with the transposed view of [N, ceil(K/64), 2].
    """
    matrix = _dense(matrix)
    if _is_transposed(matrix):
        return matrix, pack_last(scale.transpose(-1, -2)).transpose(-3, -2)
    return matrix, pack_before(scale)


def _dense(matrix: torch.Tensor) -> torch.Tensor:
    """The matrix itself if it is contiguous or a transposed view of one that is, else a contiguous copy."""
    return matrix if matrix.is_contiguous() or _is_transposed(matrix) else matrix.contiguous()


def _is_transposed(matrix: torch.Tensor) -> bool:
    return not matrix.is_contiguous() and matrix.transpose(-1, -2).is_contiguous()


def _blocks(length: int) -> int:
    return -(-length // BLOCK)


def _group_rows(ends: list[int], device: torch.device) -> torch.Tensor:
    """Where each row of the contract's grouped scale stands among the NPU's single scales, int64."""
    rows: list[int] = []
    for group, (start, end) in enumerate(pairwise([0, *ends])):
        first = 2 * (start // PAIR + group)
        rows.extend(range(first, first + _blocks(end - start)))
    return torch.tensor(rows, dtype=torch.int64, device=device)
