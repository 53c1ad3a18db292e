"""The tile layout of scales, against the documented formula and against another project's functions."""

from __future__ import annotations

import pytest
import torch
from helpers.cuda_witness import read_tiles
from torchao.prototype.moe_training.kernels.mxfp8.quant import (
    torch_to_blocked_2d_K_groups,
    torch_to_blocked_2d_M_groups,
    torch_to_blocked_per_group_3d,
)
from torchao.prototype.mx_formats.utils import to_blocked

from quaver.backends.cuda import swizzle

SHAPES = [(1, 1), (128, 4), (129, 5), (40, 3), (300, 11)]


def scales(*shape: int) -> torch.Tensor:
    return torch.arange(1, 1 + torch.Size(shape).numel()).remainder(251).to(torch.uint8).view(shape)


@pytest.mark.parametrize("shape", SHAPES)
def test_tiles(shape):
    scale = scales(*shape)
    flat = swizzle.tiled(scale)
    assert torch.equal(flat, to_blocked(scale))
    assert torch.equal(read_tiles(flat, *shape), scale)
    assert flat.sum(dtype=torch.int64) == scale.sum(dtype=torch.int64)  # what fills up is 0


def test_one_tile_by_hand():
    scale = torch.zeros(128, 4, dtype=torch.uint8)
    scale[0, 1], scale[1, 0], scale[32, 0], scale[97, 3] = 1, 2, 3, 4
    flat = swizzle.tiled(scale)
    assert {int(i): int(flat[i]) for i in flat.nonzero()} == {1: 1, 16: 2, 4: 3, 16 + 12 + 3: 4}


def test_experts():
    scale = scales(3, 40, 5)
    assert torch.equal(swizzle.tiled_experts(scale), torch_to_blocked_per_group_3d(scale))


@pytest.mark.parametrize("counts", [(40, 0, 130, 1), (128, 256), (0, 5)])
def test_groups_of_rows(counts):
    ends = torch.tensor(counts).cumsum(0)
    scale = scales(sum(counts), 4)
    found = swizzle.tiled_row_groups(scale, ends.tolist())
    wanted, starts = torch_to_blocked_2d_M_groups(scale, ends)
    assert found.shape[0] == int(starts[-1])
    assert torch.equal(found, wanted[: found.shape[0]])


@pytest.mark.parametrize("counts", [(2, 0, 5, 1), (4, 8), (0, 3)])
def test_groups_of_blocks(counts):
    ends = torch.tensor(counts).cumsum(0)
    scale = scales(140, sum(counts))
    found = swizzle.tiled_block_groups(scale, ends.tolist())
    wanted, starts = torch_to_blocked_2d_K_groups(scale, ends)
    assert found.shape[1] == int(starts[-1])
    assert torch.equal(found.reshape(-1), wanted.reshape(-1)[: found.numel()])
