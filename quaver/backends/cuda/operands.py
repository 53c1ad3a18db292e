"""Contract operands as torch's scaled products take them: E4M3 matrices that are contiguous along the contraction.

Both matrices are [rows, K] with scales [rows, ceil(K/32)]; an operand that lies the other way is copied as codes, never
quantised anew. K is filled up to whole blocks, rows of the right matrix to a multiple of 16, tokens that are contracted
to whole blocks of each expert, all with code 0. May import: torch, contract.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F

from quaver.backends.contract import QuantizedOperand

BLOCK, LANES = 32, 16


@dataclass(frozen=True)
class Matrix:
    """Codes [..., rows, K] (uint8, contiguous, K a multiple of 32) and their scales [..., rows, K/32]."""

    codes: torch.Tensor
    scale: torch.Tensor


def contiguous_along(operand: QuantizedOperand, *, transposed: bool) -> Matrix:
    """The operand with its contraction last, K filled up; `transposed`: its contraction is the axis before."""
    codes, scale = operand.data, operand.scale
    if transposed:
        codes, scale = codes.transpose(-1, -2), scale.transpose(-1, -2)
    missing = -codes.shape[-1] % BLOCK
    return Matrix(F.pad(codes, (0, missing)).contiguous(), scale.contiguous())


def with_lanes(matrix: Matrix) -> Matrix:
    """Rows filled up to a multiple of 16."""
    missing = -matrix.codes.shape[-2] % LANES
    return Matrix(F.pad(matrix.codes, (0, 0, 0, missing)), F.pad(matrix.scale, (0, 0, 0, missing)))


def tokens_last(operand: QuantizedOperand, ends: list[int]) -> Matrix:
    """Tokens [S, N] with `col` blocks restarting at each group -> [N, tokens filled up to 32 in each group]."""
    padded, _ = padded_ends(ends)
    device = operand.data.device
    counts = torch.tensor([end - start for start, end in pairwise([0, *ends])], device=device)
    moved = torch.tensor([new - old for new, old in zip([0, *padded[:-1]], [0, *ends[:-1]])], device=device)
    places = torch.arange(operand.shape[0], device=device) + moved.repeat_interleave(counts)
    codes = operand.data.new_zeros((operand.shape[1], padded[-1]))
    codes[:, places] = operand.data.t()
    return Matrix(codes, operand.scale.t().contiguous())


def padded_ends(ends: list[int]) -> tuple[list[int], list[int]]:
    """(token ends, block ends) once each group is filled up to whole blocks."""
    tokens, blocks, total = [], [], 0
    for start, end in pairwise([0, *ends]):
        total += -(-(end - start) // BLOCK)
        tokens.append(total * BLOCK)
        blocks.append(total)
    return tokens, blocks
