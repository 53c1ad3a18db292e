"""Scales as the tensor cores read them: tiles of 128 rows x 4 scales, each tile 32 x 16 bytes.

Within a tile the scale of row r and block c lies at byte (r % 32) * 16 + (r // 32) * 4 + c; tiles follow each other
along the blocks first. Rows are filled up to 128 and blocks to 4 with scale 0. Source: the cuBLAS documentation, "1D
Block Scaling Factors Layout". In a grouped product each group is tiled by itself. All on uint8, any device.
May import: torch.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F

ROWS, BLOCKS = 128, 4


def tiled(scale: torch.Tensor) -> torch.Tensor:
    """[R, C] -> [128 * ceil(R/128) * 4 * ceil(C/4)], flat."""
    rows, blocks = scale.shape
    padded = F.pad(scale, (0, -blocks % BLOCKS, 0, -rows % ROWS))
    tiles = padded.unflatten(0, (-1, 4, 32)).unflatten(-1, (-1, BLOCKS))  # [tile row, r // 32, r % 32, tile column, c]
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1)


def tiled_experts(scale: torch.Tensor) -> torch.Tensor:
    """[E, R, C] -> [E, bytes of one expert's tiles]."""
    return torch.stack([tiled(one) for one in scale])


def tiled_row_groups(scale: torch.Tensor, ends: list[int]) -> torch.Tensor:
    """[S, C], rows in groups -> [sum of 128 * ceil(n_e/128), 4 * ceil(C/4)]: each group's tiles, one after another."""
    width = -(-scale.shape[1] // BLOCKS) * BLOCKS
    parts = [tiled(scale[start:end]) for start, end in pairwise([0, *ends]) if end > start]
    return torch.cat(parts).view(-1, width) if parts else scale.new_zeros((0, width))


def tiled_block_groups(scale: torch.Tensor, block_ends: list[int]) -> torch.Tensor:
    """[R, C], blocks in groups -> [128 * ceil(R/128), sum of 4 * ceil(c_e/4)]: the groups' tiles in order."""
    rows = -(-scale.shape[0] // ROWS) * ROWS
    parts = [tiled(scale[:, start:end]) for start, end in pairwise([0, *block_ends]) if end > start]
    return torch.cat(parts).view(rows, -1) if parts else scale.new_zeros((rows, 0))
