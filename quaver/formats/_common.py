"""What both codecs share: input checks, constant tables and lookup, work in pieces. Imports torch alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

# Elements per thread in one piece; measured best of 2^16..2^22 for chains of element-wise operations.
_PIECE_NUMEL = 1 << 19

_CONSTANTS: dict[tuple[str, torch.device], Tensor] = {}


def check_float(x: Tensor, what: str) -> None:
    """Raise TypeError unless `x` is float32 or bfloat16: no other dtype has an exact, defined cast here."""
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
        raise TypeError(f"{what} takes uint8, not {found}; view other eight-bit dtypes as torch.uint8")


def check_decoded_dtype(dtype: torch.dtype, what: str) -> None:
    """Raise TypeError unless `dtype` is float32 or bfloat16."""
    if dtype not in (torch.float32, torch.bfloat16):
        raise TypeError(f"{what} gives float32 or bfloat16, not {dtype}")


def constant(name: str, device: torch.device, build: Callable[[], Tensor]) -> Tensor:
    """The constant tensor `name` on `device`, built on first use and kept; callers never write to it."""
    table = _CONSTANTS.get((name, device))
    if table is None:
        # Outside inference mode, so that a table first used there can still serve autograd later.
        with torch.inference_mode(False), torch.no_grad():
            table = build().to(device)
        if type(table) is Tensor:  # a tracing mode builds fake tensors, which must not outlive it
            _CONSTANTS[name, device] = table
    return table


def pieces(length: int, row_numel: int, device: torch.device) -> Iterator[slice]:
    """Slices of an axis of `length` rows, `row_numel` elements each, that together cover it.

    On a CPU a slice is small enough that the temporaries of a chain of element-wise operations stay in cache
    and in the allocator's arena: up to twice as fast as whole-tensor passes. Elsewhere, and while compiling,
    one slice.
    """
    step = max(1, length)
    if device.type == "cpu" and not torch.compiler.is_compiling():
        step = max(1, _PIECE_NUMEL * torch.get_num_threads() // max(1, row_numel))
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))


def host_amax(x: Tensor) -> float | None:
    """The largest element of a non-empty `x` (NaN if there is one), or None where looking would cost more.

    Lets a CPU skip a pass that only rare values need. On an accelerator the host would wait for the device,
    and while compiling it would break the graph: there the callers simply make the pass.
    """
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return None
    return x.amax().item()


def lookup(table: Tensor, index: Tensor) -> Tensor:
    """`table[index]` for a 1-d table and any integer index within it; contiguous, shaped as `index`.

    index_select over int32 is several times faster on a CPU than advanced indexing, which wants int64.
    """
    out = torch.empty(index.shape, dtype=table.dtype, device=index.device)
    flat_index, flat_out = index.contiguous().view(-1), out.view(-1)
    for part in pieces(flat_index.numel(), 1, index.device):
        torch.index_select(table, 0, flat_index[part].to(torch.int32), out=flat_out[part])
    return out
