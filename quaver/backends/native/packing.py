"""Weights decoded straight into the blocked order in which oneDNN multiplies them, GEMM by GEMM.

A BF16 GEMM of oneDNN first copies its weight into panels of 64 output features; given a weight that is packed
already it does not. Packing as a step of its own costs as much as it saves, but decoding costs the same wherever
the values go: so the codes are decoded into a packed buffer, multiplied, and the buffer serves the next weight of
that shape. Nothing is kept from one weight to another, so nothing can be stale.

`torch.ops.mkldnn` is private. It is used with the torch version that it was read in, and for each shape only after
a product through it has come out equal to torch.mm's, bit for bit. May import: torch, kernels.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from quaver.backends.native import kernels

PANEL = 64
"""Features and contracted lengths that are multiples of it are packed without padding."""

KNOWN_TORCH = "2.13."
POOL_BYTES = 256 << 20
LARGE = 1 << 20  # elements of a weight from which packing shortens a product of any length by 3 % or more
FEW_ROWS = 128  # rows below which it shortens a product with a smaller weight by 5 % or more
CHECK_ROWS = (5, 64)


@cache
def supported() -> bool:
    """True if this torch has the private operators as they are known, and multiplies BF16 through oneDNN."""
    return (
        torch.__version__.startswith(KNOWN_TORCH)
        and torch.backends.mkldnn.is_available()
        and all(
            hasattr(torch.ops.mkldnn, name)
            for name in ("_linear_pointwise", "_reorder_linear_weight", "data_ptr", "_nbytes")
        )
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def pays(rows: int, contracted: int, features: int) -> bool:
    """True if products of this many rows gain more than their copy into a grouped result costs (measured)."""
    return contracted * features >= LARGE or rows < FEW_ROWS


class _Buffer(NamedTuple):
    """A packed tensor and where its values lie."""

    tensor: Tensor
    address: int


class _Pool(threading.local):
    """Packed buffers by (features, contracted), least recently used first; one pool a thread."""

    def __init__(self) -> None:
        self.buffers: OrderedDict[tuple[int, int], _Buffer | None] = OrderedDict()

    def get(self, features: int, contracted: int) -> _Buffer | None:
        """A buffer of that shape, or None where packed products are not equal to torch.mm's."""
        key = (features, contracted)
        if key in self.buffers:
            self.buffers.move_to_end(key)
            return self.buffers[key]
        buffer = _checked_buffer(features, contracted)
        self.buffers[key] = buffer
        while sum(2 * f * c for (f, c), held in self.buffers.items() if held is not None) > POOL_BYTES:
            if len(self.buffers) == 1:
                break
            self.buffers.popitem(last=False)
        return buffer


_POOL = _Pool()


def pack(codes: Tensor, scales: Tensor, *, columns: bool) -> Tensor | None:
    """An MXFP8 weight as oneDNN's packed BF16 one, for `linear`; valid until the next call on this thread.

    Args:
        codes: [features, contracted] in row blocks, or with `columns` [contracted, features] in column blocks.
        scales: its scale bytes.

    Returns:
        None where the shape is not packed, or BF16 would lose something.
    """
    features, contracted = codes.shape[::-1] if columns else codes.shape
    if features % PANEL or contracted % PANEL or not codes.numel() or not supported():
        return None
    if not kernels.usable(codes, scales):
        return None
    buffer = _POOL.get(features, contracted)
    if buffer is None:
        return None
    if not kernels.pack_into(codes.contiguous(), scales.contiguous(), columns=columns, address=buffer.address):
        return None
    return buffer.tensor


def linear(x: Tensor, packed: Tensor) -> Tensor:
    """x [T, contracted] times the packed weight: BF16 [T, features], accumulated in FP32, rounded once."""
    return torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")


def _checked_buffer(features: int, contracted: int) -> _Buffer | None:
    """A packed buffer that our own packing fills so that products are torch.mm's; None where they are not."""
    generator = torch.Generator("cpu").manual_seed(features * 31 + contracted)
    weight = kernels.buffer((features, contracted), torch.float32).normal_(generator=generator)
    row, _ = kernels.quantize(weight, rceil=False, row=kernels.Want.BOTH)
    assert row is not None  # asked for
    codes, values = row.codes, row.values
    assert codes is not None  # asked for
    if values is None:
        return None
    buffer: Tensor = torch.ops.mkldnn._reorder_linear_weight(values)
    if not buffer.is_mkldnn or torch.ops.mkldnn._nbytes(buffer) != 2 * features * contracted:
        return None  # another blocked order, or none at all
    address: int = torch.ops.mkldnn.data_ptr(buffer)
    for rows in CHECK_ROWS:
        x = kernels.buffer((rows, contracted), torch.float32).normal_(generator=generator).bfloat16()
        wanted = torch.mm(x, values.t())
        if not torch.equal(linear(x, buffer), wanted):
            return None
        kernels.pack_into(codes, row.scales, columns=False, address=address)
        if not torch.equal(linear(x, buffer), wanted):
            return None
    return _Buffer(buffer, address)
