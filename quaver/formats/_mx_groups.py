"""MXFP8 over tokens sorted by group: blocks of 32 along the first axis that restart at every group.

A GEMM that contracts tokens of one expert must not share a scale with its neighbour's, so each group is
padded to whole blocks, quantised in one pass, and the padding dropped again: ceil(n_e / 32) scale rows per
group, none for an empty one. Group ends are cumulative token counts. No loop over groups. Imports torch
alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from quaver.formats._common import check_codes, check_decoded_dtype, check_float, lookup
from quaver.formats._mx_blocks import BLOCK, blocked, dequantize, e4m3_table, quantize_blocked, scale_values


class _Rows(NamedTuple):
    """Where tokens stand among whole blocks."""

    blocks: int  # rows of scales
    padded_row: Tensor | None  # where each token goes, int64 [S]; None where every group fills its blocks
    source: Tensor | None  # the token that each padded row holds, int64 [32 * blocks]; None likewise


def group_scale_ends(group_ends: Tensor) -> Tensor:
    """Cumulative rows of scales per group, int64 [E]: sums of ceil(n_e / 32)."""
    return _block_counts(group_ends).cumsum(0)


def quantize_groups(x_SK: Tensor, group_ends: Tensor, *, scale_rule: str = "floor") -> tuple[Tensor, Tensor]:
    """Quantise tokens along the token axis, each group by itself.

    Args:
        x_SK: float32 or bfloat16 [S, K], tokens sorted by group.
        group_ends: int64 [E], cumulative token counts; the last is S. Groups of any size, 0 included.
        scale_rule: "floor" or "rceil".

    Returns:
        codes uint8 [S, K], scales uint8 [sum of ceil(n_e / 32), K].

    Raises:
        TypeError: another dtype. ValueError: ends that do not fit S, or `x_SK` not 2-d.
    """
    check_float(x_SK, "mxfp8.quantize_groups")
    rows = _rows(x_SK, group_ends)
    x_SK = x_SK.detach()
    padded = x_SK if rows.source is None else x_SK.index_select(0, rows.source)
    codes, scales = quantize_blocked(blocked(padded, 0), 1, scale_rule)
    codes = codes.flatten(0, 1)
    if rows.padded_row is not None:
        codes = codes.index_select(0, rows.padded_row)
    return codes.contiguous(), scales.squeeze(1).contiguous()


def dequantize_groups(
    codes: Tensor, scales: Tensor, group_ends: Tensor, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The inverse of `quantize_groups`; values as in `dequantize`.

    Args:
        codes: uint8 [S, K].
        scales: uint8 [sum of ceil(n_e / 32), K].
        group_ends: int64 [E].
        dtype: torch.float32 or torch.bfloat16.

    Returns:
        values [S, K], contiguous.

    Raises:
        TypeError: another dtype. ValueError: ends or scales that do not fit `codes`.
    """
    check_codes(codes, "mxfp8.dequantize_groups")
    check_codes(scales, "mxfp8.dequantize_groups scales")
    check_decoded_dtype(dtype, "mxfp8.dequantize_groups")
    rows = _rows(codes, group_ends)
    if tuple(scales.shape) != (rows.blocks, codes.shape[1]):
        raise ValueError(
            f"scales of shape {tuple(scales.shape)} do not fit codes of shape {tuple(codes.shape)} in these"
            f" groups; expected {(rows.blocks, codes.shape[1])}"
        )
    if rows.padded_row is None:
        return dequantize(codes, scales, axis=0, dtype=dtype)
    row_scales = scale_values(scales, dtype).index_select(0, rows.padded_row // BLOCK)
    return lookup(e4m3_table(dtype, codes.device), codes).mul_(row_scales)


def _rows(x_SK: Tensor, group_ends: Tensor) -> _Rows:
    if x_SK.dim() != 2:
        raise ValueError(f"grouped MXFP8 takes tokens as [S, K], not shape {tuple(x_SK.shape)}")
    if group_ends.dtype != torch.int64 or group_ends.dim() != 1:
        raise TypeError(
            f"group ends are int64 [E], not {group_ends.dtype} of shape {tuple(group_ends.shape)}"
        )
    tokens = x_SK.shape[0]
    if group_ends.numel() == 0:
        if tokens:
            raise ValueError(f"no groups, but {tokens} tokens")
        return _Rows(0, None, None)
    group_ends = group_ends.to(x_SK.device)
    counts = torch.diff(group_ends, prepend=group_ends.new_zeros(1))
    block_ends = group_scale_ends(group_ends)
    # One transfer for all that the host must know.
    smallest, last, blocks = torch.stack([counts.amin(), group_ends[-1], block_ends[-1]]).tolist()
    if smallest < 0 or last != tokens:
        raise ValueError(
            f"group ends must not decrease and must end at the {tokens} tokens of x; they end at {last},"
            f" and the smallest group has {smallest} tokens"
        )
    if blocks * BLOCK == tokens:
        return _Rows(blocks, None, None)
    padding_before = (block_ends - _block_counts(group_ends)) * BLOCK - (group_ends - counts)
    token = torch.arange(tokens, device=x_SK.device)
    padded_row = token + padding_before[torch.searchsorted(group_ends, token, right=True)]
    # A padded row repeats its group's last token: it shares a block with that token, so no maximum changes.
    row = torch.arange(blocks * BLOCK, device=x_SK.device)
    group = torch.searchsorted(block_ends * BLOCK, row, right=True)
    source = torch.minimum(row - padding_before[group], group_ends[group] - 1)
    return _Rows(blocks, padded_row, source)


def _block_counts(group_ends: Tensor) -> Tensor:
    counts = torch.diff(group_ends, prepend=group_ends.new_zeros(1))
    return (counts + (BLOCK - 1)) // BLOCK
