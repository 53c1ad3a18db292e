"""torch's scaled products on the CPU: torch's own checks of a CUDA call, and the exact reference behind it.

Checks come from the shape functions of the installed torch, run on tensors that only claim to be CUDA's. Scales are
read back byte by byte from the documented tile layout, not with the adapter's code.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode

from quaver.backends import GemmSite, QuantizedOperand, ReferenceBackend

MX, TILES = F.ScalingType.BlockWise1x32, F.SwizzleType.SWIZZLE_32_4_4
SITE = GemmSite("witness", "fprop")
scaled_mm = F.scaled_mm


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts the witnesses where the adapter finds the products."""
    monkeypatch.setattr(F, "scaled_mm", _dense)
    monkeypatch.setattr(F, "scaled_grouped_mm", _grouped)


def read_tiles(flat: torch.Tensor, rows: int, blocks: int) -> torch.Tensor:
    """[rows, blocks] of uint8 scales: row r, block c of a tile of 128 x 4 lies at (r % 32) * 16 + (r // 32) * 4 + c."""
    flat = flat.reshape(-1).view(torch.uint8)
    across = -(-blocks // 4)
    assert flat.numel() == -(-rows // 128) * across * 512
    r, c = torch.meshgrid(torch.arange(rows), torch.arange(blocks), indexing="ij")
    tile = (r // 128) * across + c // 4
    return flat[tile * 512 + (r % 32) * 16 + (r % 128 // 32) * 4 + c % 4]


def _claimed(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda")


def _operand(codes: torch.Tensor, scale: torch.Tensor, turn: str) -> QuantizedOperand:
    return QuantizedOperand(codes.view(torch.uint8), scale, torch.bfloat16, "mxfp8_e4m3", turn)


def _dense(a, b, scale_a, recipe_a, scale_b, recipe_b, swizzle_a, swizzle_b, *, output_dtype):
    assert (recipe_a, recipe_b, swizzle_a, swizzle_b) == (MX, MX, TILES, TILES)
    with FakeTensorMode():
        given = [_claimed(tensor) for tensor in (a, b, scale_a, scale_b)]
        out = scaled_mm(*given[:2], given[2], MX, given[3], MX, TILES, TILES, output_dtype=output_dtype)
    blocks = a.shape[1] // 32
    left = _operand(a, read_tiles(scale_a, a.shape[0], blocks), "row")
    right = _operand(b.t(), read_tiles(scale_b, b.shape[1], blocks), "row")
    found = ReferenceBackend().low_precision_matmul(
        left, right, layout="NT", output_dtype=output_dtype, site=SITE
    )
    assert (found.shape, found.dtype) == (out.shape, out.dtype)
    return found


def _grouped(a, b, scale_a, recipe_a, scale_b, recipe_b, swizzle_a, swizzle_b, *, offs, output_dtype):
    assert (recipe_a, recipe_b, swizzle_a, swizzle_b) == (MX, MX, TILES, TILES)
    with FakeTensorMode():
        given = [_claimed(tensor) for tensor in (a, b, scale_a, scale_b, offs)]
        out = torch._scaled_grouped_mm(*given[:4], offs=given[4], out_dtype=output_dtype)
    ends = offs.tolist()
    find = ReferenceBackend().low_precision_grouped_matmul
    if b.ndim == 3:  # rows of a by expert
        blocks = a.shape[1] // 32
        left = torch.cat(_row_groups(scale_a, ends, blocks)) if ends[-1] else scale_a.new_empty((0, blocks))
        right = torch.stack([read_tiles(one, b.shape[2], blocks) for one in scale_b])
        operands = _operand(a, left.view(torch.uint8), "row"), _operand(b.transpose(1, 2), right, "row")
        found = find(*operands, offs.long(), layout="NT", output_dtype=output_dtype, site=SITE)
    else:  # tokens contracted by expert, each filled up to whole blocks
        assert all(end % 32 == 0 for end in ends)
        left, right = (_block_groups(s, ends, n) for s, n in ((scale_a, a.shape[0]), (scale_b, b.shape[1])))
        operands = _operand(a.t().contiguous(), left, "col"), _operand(b.contiguous(), right, "col")
        found = find(*operands, offs.long(), layout="TN", output_dtype=output_dtype, site=SITE)
        found[offs.diff(prepend=offs.new_zeros(1)) == 0] = torch.nan  # nobody promises what is left there
    assert (found.shape, found.dtype) == (out.shape, out.dtype)
    return found


def _row_groups(scale: torch.Tensor, ends: list[int], blocks: int) -> list[torch.Tensor]:
    width, first, parts = -(-blocks // 4) * 4, 0, []
    assert scale.shape[1] == width
    for start, end in pairwise([0, *ends]):
        rows = -(-(end - start) // 128) * 128
        if rows:
            parts.append(read_tiles(scale[first : first + rows], end - start, blocks))
        first += rows
    return parts


def _block_groups(scale: torch.Tensor, ends: list[int], rows: int) -> torch.Tensor:
    flat, padded, first, parts = scale.reshape(-1), -(-rows // 128) * 128, 0, []
    for start, end in pairwise([0, *ends]):
        blocks = (end - start) // 32
        size = padded * -(-blocks // 4) * 4
        if blocks:
            parts.append(read_tiles(flat[first : first + size], rows, blocks).t())
        first += size
    assert first == flat.numel()
    return torch.cat(parts).contiguous()
