"""Scale layouts of the contract and of the NPU: known answers, the harness's own conversion, and the way back."""

from __future__ import annotations

import pytest
import torch
from helpers.npu_harness import storage

from quaver.backends.npu import layouts

LENGTHS = [1, 31, 32, 33, 64, 65, 96, 128, 352]


def scales(*shape):
    return torch.arange(1, 1 + torch.Size(shape).numel()).to(torch.uint8).view(shape)


def test_known_answers():
    row = torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=torch.uint8)
    assert layouts.pack_last(row).tolist() == [[[1, 2], [3, 0]], [[4, 5], [6, 0]]]
    col = torch.tensor([[1, 2], [3, 4], [5, 6]], dtype=torch.uint8)  # 3 blocks of rows, 2 columns
    assert layouts.pack_before(col).tolist() == [[[1, 3], [2, 4]], [[5, 0], [6, 0]]]
    # groups of 33, 0 and 40 tokens: rows start at 0, 33 // 64 + 1 and 33 // 64 + 2 of 73 // 64 + 3
    grouped = torch.tensor([[1], [2], [3], [4]], dtype=torch.uint8)
    assert layouts.pack_groups(grouped, [33, 33, 73]).tolist() == [[[1, 2]], [[0, 0]], [[3, 4]], [[0, 0]]]


@pytest.mark.parametrize("lead", [(), (3,)])
@pytest.mark.parametrize("length", LENGTHS)
def test_pairs_there_and_back(length, lead):
    blocks = -(-length // 32)
    row, col = scales(*lead, 5, blocks), scales(*lead, blocks, 5)
    assert torch.equal(layouts.pack_last(row), storage.pairs(row, -1))
    assert torch.equal(layouts.pack_before(col), storage.pairs(col, -2))
    assert layouts.pack_last(row).shape == (*lead, 5, -(-length // 64), 2)
    assert layouts.pack_before(col).shape == (*lead, -(-length // 64), 5, 2)
    assert torch.equal(layouts.unpack_last(layouts.pack_last(row), length), row)
    assert torch.equal(layouts.unpack_before(layouts.pack_before(col), length), col)


@pytest.mark.parametrize("counts", [(0,), (1,), (64,), (31, 0, 32, 33), (0, 0, 200, 1), (63, 1, 65, 127, 0)])
def test_groups_there_and_back(counts):
    ends = torch.tensor(counts).cumsum(0).tolist()
    compact = scales(sum(-(-count // 32) for count in counts), 3)
    packed = layouts.pack_groups(compact, ends)
    assert torch.equal(packed, storage.group_pairs(compact, ends))
    assert packed.shape == (sum(counts) // 64 + len(counts), 3, 2)
    assert torch.equal(layouts.unpack_groups(packed, ends), compact)


@pytest.mark.parametrize("transposed", [False, True])
def test_matrix_and_scale_share_their_state(transposed):
    codes, scale = scales(70, 100), scales(70, 4)  # [M, K], blocks along K
    if transposed:
        codes, scale = codes.t().contiguous().t(), scale.t().contiguous().t()
    matrix, packed = layouts.left_operand(codes, scale)
    assert matrix.data_ptr() == codes.data_ptr()
    assert packed.shape == (70, 2, 2)
    assert packed.is_contiguous() is not transposed
    assert packed.transpose(0, 1).is_contiguous() is transposed
    assert torch.equal(packed, storage.pairs(scale, -1))
    turned, turned_packed = layouts.right_operand(codes.t(), scale.t())  # [K, M], blocks along K
    assert turned_packed.shape == (2, 70, 2)
    assert turned_packed.is_contiguous() is transposed
    assert torch.equal(turned, codes.t())
    assert torch.equal(turned_packed, storage.pairs(scale.t(), -2))


def test_a_matrix_in_no_state_is_copied():
    codes, scale = scales(70, 200)[:, ::2], scales(70, 4)
    matrix, packed = layouts.left_operand(codes, scale)
    assert matrix.is_contiguous()
    assert packed.is_contiguous()
    assert torch.equal(matrix, codes)


def test_rows_of_whole_pairs_are_a_view():
    scale = scales(70, 4)
    assert layouts.pack_last(scale).data_ptr() == scale.data_ptr()
