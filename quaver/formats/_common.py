"""What both codecs share: the input check and the lookup in a small table. Imports torch alone."""

from __future__ import annotations

import torch
from torch import Tensor


def check_float(x: Tensor, what: str) -> None:
    """Raise TypeError unless `x` is a float32 or bfloat16 tensor: no other dtype has an exact, defined cast here."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{what} takes a torch.Tensor, not {type(x).__name__}")
    if x.dtype not in (torch.float32, torch.bfloat16):
        raise TypeError(
            f"{what} takes float32 or bfloat16, not {x.dtype} (shape {tuple(x.shape)}); cast explicitly first"
        )


def check_codes(codes: Tensor, what: str) -> None:
    """Raise TypeError unless `codes` is a uint8 tensor."""
    if not isinstance(codes, Tensor) or codes.dtype != torch.uint8:
        found = codes.dtype if isinstance(codes, Tensor) else type(codes).__name__
        raise TypeError(f"{what} takes a uint8 tensor, not {found}; view other eight-bit dtypes as torch.uint8")


def check_decoded_dtype(dtype: torch.dtype, what: str) -> None:
    """Raise TypeError unless `dtype` is float32 or bfloat16."""
    if dtype not in (torch.float32, torch.bfloat16):
        raise TypeError(f"{what} gives float32 or bfloat16, not {dtype}")


def lookup(table: Tensor, index: Tensor) -> Tensor:
    """`table[index]` for a 1-d table; contiguous, shaped as `index` (any integer dtype, values within the table).

    index_select over int32 is several times faster on a CPU than advanced indexing, which wants int64.
    """
    flat = index.to(torch.int32).contiguous().view(-1)
    return table.index_select(0, flat).view(index.shape)
