"""The experts' computed sources on the kernels: SwiGLU, its gradient, gathered and weighted rows, and the sums.

Bits are those of torch's operators. SiLU of BF16 and its derivative start from a table of sigmoids by bit pattern; it
is used only where what the kernels make of it is torch's SiLU over all patterns and its FP32 silu_backward exactly,
which depends on the vector code that torch runs. May import: torch, kernels, sources.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import cast

import torch
from torch import Tensor

from quaver.backends.native import kernels
from quaver.backends.native.kernels import Quantized, Want, ends_fit, usable
from quaver.backends.sources import GatheredRows, RowSource, ScaledRows, SwiGLU, SwiGLUGradient

LANES = 64
"""Widths that are multiples of it have no rest that torch would compute by its scalar code."""

LARGEST_K = 16
"""torch sums fewer rows than this one after the other."""

PRODUCTS = 1 << 17  # FP32 products at a time: half a second-level cache


GRAIN = 1 << 15
"""Elements from which on torch shares one sum among threads."""


class _Inputs(ctypes.Structure):
    _fields_ = [
        ("kind", ctypes.c_int),
        *((name, ctypes.c_void_p) for name in ("a", "b", "index", "weight", "sigmoid")),
        ("cols", ctypes.c_int64),
        ("fused", ctypes.c_int),
    ]


@dataclass(frozen=True)
class _Sigmoids:
    of: Tensor  # FP32 [65536], by BF16 pattern
    fused: bool  # the derivative has a fused multiply-add


@cache
def _sigmoids() -> _Sigmoids | None:
    """None where torch's SiLU or its derivative is not what the kernels compute."""
    with torch.inference_mode(False), torch.no_grad():
        patterns = torch.arange(65536, dtype=torch.int32, device="cpu").to(torch.int16).view(torch.bfloat16)
        x = patterns.float()
        sigmoid = torch.sigmoid(x)
        if not _equal((x * sigmoid).bfloat16(), torch.nn.functional.silu(patterns)):
            return None
        generator = torch.Generator("cpu").manual_seed(0)
        rest = kernels.buffer(65536, torch.float32)
        for fused in (True, False):
            kernels.call("quaver_silu_rest", sigmoid.data_ptr(), fused, rest.data_ptr())
            if all(_reproduces(x, sigmoid, rest, generator) for _ in range(4)):
                return _Sigmoids(sigmoid, fused)
    return None


def sigmoids_serve() -> bool:
    """Whether SwiGLU is computed while it is quantised, to torch's own bits."""
    return usable() and _sigmoids() is not None


def _reproduces(x: Tensor, sigmoid: Tensor, rest: Tensor, generator: torch.Generator) -> bool:
    dy = kernels.buffer(x.shape, torch.float32).normal_(generator=generator)
    return _equal(dy * sigmoid * rest, torch.ops.aten.silu_backward(dy, x))


def _equal(found: Tensor, wanted: Tensor) -> bool:
    """True of the same bits, zeros' signs included; but any NaN equals any other."""
    words = torch.int16 if found.dtype is torch.bfloat16 else torch.int32
    same = (found.view(words) == wanted.view(words)) | (found.isnan() & wanted.isnan())
    return bool(same.all())


def _inputs(source: RowSource) -> tuple[_Inputs, tuple[Tensor, ...]] | None:
    """The kernel's view of a source, and the tensors that it points into; None where no kernel takes it."""
    at, held = Tensor.data_ptr, cast(tuple[Tensor, ...], ())
    if source.dtype is not torch.bfloat16:
        return None
    cols = source.shape[1]
    if isinstance(source, ScaledRows):
        held = (source.g.contiguous(), source.index.contiguous(), source.weight.contiguous())
        fits = held[1].dtype is torch.int64 and held[2].dtype is torch.float32
        if not fits or not usable(*held) or not _within(held[1], held[0].shape[0]):
            return None
        return _Inputs(0, at(held[0]), None, at(held[1]), at(held[2]), None, cols, False), held
    if not isinstance(source, SwiGLU | SwiGLUGradient):
        return None
    if not usable(source.h):
        return None
    sigmoids, half = _sigmoids(), source.h.shape[1] // 2
    if sigmoids is None or half % LANES:
        return None
    h, table, fused = source.h.contiguous(), sigmoids.of, sigmoids.fused
    if isinstance(source, SwiGLU):
        return _Inputs(1, at(h), None, None, None, at(table), cols, fused), (h, table)
    da = source.da.contiguous()
    if not usable(da) or da.dtype is not torch.bfloat16:
        return None
    return _Inputs(2, at(da), at(h), None, None, at(table), cols, fused), (da, h, table)


def _within(index: Tensor, rows: int) -> bool:
    """True of row numbers that lie in 0..rows - 1: a kernel follows them without looking."""
    if index.numel() == 0:
        return True
    lowest, highest = torch.aminmax(index)
    return int(lowest) >= 0 and int(highest) < rows


def quantize(
    source: RowSource, *, rceil: bool, row: Want | None, col: Want | None, ends: Tensor | None
) -> tuple[Quantized | None, Quantized | None] | None:
    """MXFP8 of a source as in `kernels.quantize`; None where no kernel takes it."""
    if ends is not None and not ends_fit(ends, source.shape[0]):
        return None
    if isinstance(source, GatheredRows):
        x, index = source.x, source.index
        fits = x.dtype in (torch.bfloat16, torch.float32) and x.ndim == 2 and index.dtype is torch.int64
        if not fits or not usable(x, index) or not index.is_contiguous() or not _within(index, x.shape[0]):
            return None
        return kernels.quantize(x, rceil=rceil, row=row, col=col, ends=ends, index=index)
    found = _inputs(source)
    if found is None:
        return None
    return kernels.quantize_computed(found[0], source.shape, rceil=rceil, row=row, col=col, ends=ends)


def fill(source: RowSource) -> tuple[Tensor, Tensor] | None:
    """A source as a BF16 tensor, and its FP32 amax (0-d); None where no kernel takes it."""
    found = _inputs(source)
    if found is None:
        return None
    out, amax = kernels.buffer(source.shape, torch.bfloat16), kernels.buffer((), torch.float32).zero_()
    if out.numel():
        kernels.call(
            "quaver_fill_experts", ctypes.byref(found[0]), out.shape[0], out.data_ptr(), amax.data_ptr()
        )
    return out, amax


def combine(y: Tensor, place: Tensor, weight: Tensor | None) -> Tensor | None:
    """sum_k weight[t, k] * y[place[t, k]] in FP32, rounded once to BF16; None where no kernel takes it.

    Args:
        y: BF16 [S, H].
        place: int64 [T, k], rows of y; each below S.
        weight: FP32 [T, k], or None for a plain sum.
    """
    tensors = (y, place) if weight is None else (y, place, weight)
    if not usable(*tensors) or not all(t.is_contiguous() for t in tensors) or y.dtype is not torch.bfloat16:
        return None
    if weight is not None and weight.dtype is not torch.float32:
        return None
    tokens, k = place.shape
    if k >= LARGEST_K or y.shape[1] % LANES or not y.numel() or not _within(place, y.shape[0]):
        return None
    out = kernels.buffer((tokens, y.shape[1]), torch.bfloat16)
    kernels.call(
        "quaver_combine",
        y.data_ptr(),
        place.data_ptr(),
        None if weight is None else weight.data_ptr(),
        tokens,
        k,
        y.shape[1],
        out.data_ptr(),
    )
    return out


def dots(y: Tensor, place: Tensor, g: Tensor) -> Tensor | None:
    """FP32 [T, k]: the products of y[place[t, k]] and g[t], summed over H by torch; None where no kernel takes it.

    Args:
        y: BF16 [S, H]. place: int64 [T, k], rows of y. g: BF16 [T, H].
    """
    if not usable(y, place, g) or not all(t.is_contiguous() for t in (y, place, g)) or not y.numel():
        return None
    if y.dtype is not torch.bfloat16 or g.dtype is not torch.bfloat16 or not _within(place, y.shape[0]):
        return None
    (tokens, k), cols = place.shape, y.shape[1]
    step = max(1, PRODUCTS * torch.get_num_threads() // (k * cols))
    alone = k == 1 and tokens > 1 and (step == 1 or tokens % step == 1)  # a piece of one row
    if alone and cols >= GRAIN and torch.get_num_threads() > 1:
        return None  # torch would sum that row in as many parts as there are threads
    out = kernels.buffer((tokens, k), torch.float32)
    products = kernels.buffer((min(step, tokens), k, cols), torch.float32)
    for start in range(0, tokens, step):
        some = place[start : start + step]
        part = products[: len(some)]
        kernels.call(
            "quaver_products",
            y.data_ptr(),
            some.data_ptr(),
            g[start].data_ptr(),
            len(some),
            k,
            cols,
            part.data_ptr(),
        )
        torch.sum(part, -1, out=out[start : start + step])
    return out
