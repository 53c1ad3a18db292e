"""The compiled kernels behind typed functions: torch tensors in, torch tensors out, and when they may be used.

A kernel takes plain CPU tensors of FP32, BF16 or uint8. Everything else (other devices, tensor subclasses, tracing)
is for the pure-torch codecs, which define the numbers. May import: torch, build.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from enum import Enum, auto
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from quaver.backends.native.build import KernelStatus, build, failed
from quaver.backends.native.memory import keep_freed_pages
from quaver.formats import hif8, mxfp8

_P, _I, _C = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "quaver_mx_quantize": (_P, _C, _I, _I, _P, _P, _I, _I, _C, _P, _P, _P, _P, _P, _P, _C),
    "quaver_mx_decode_rows": (_P, _P, _I, _I, _P, _C),
    "quaver_mx_decode_columns": (_P, _P, _I, _P, _I, _I, _P, _C),
    "quaver_mx_pack_rows": (_P, _P, _I, _I, _I, _P, _C),
    "quaver_mx_pack_columns": (_P, _P, _I, _I, _I, _P, _C),
    "quaver_mx_experts": (_P, _P, _I, _I, _C, _P, _P, _P, _P, _P, _P, _C),
    "quaver_silu_rest": (_P, _C, _P, _C),
    "quaver_fill_experts": (_P, _I, _P, _P, _C),
    "quaver_combine": (_P, _P, _P, _I, _I, _I, _P, _C),
    "quaver_products": (_P, _P, _P, _I, _I, _I, _P, _C),
    "quaver_widen": (_P, _I, _P, _C),
    "quaver_amax": (_P, _C, _I, _I, _P, _C),
    "quaver_hif8_scales": (_P, _C, _I, _I, ctypes.c_float, _P, _C),
    "quaver_hif8_encode": (_P, _C, _I, _I, _P, _P, _P, _P, _C),
    "quaver_hif8_decode": (_P, _I, _P, _P, _C),
    "quaver_hif8_decode_transposed": (_P, _I, _I, _I, _P, _P, _C),
}
_INT_RESULT = {name for name in _SIGNATURES if name.startswith("quaver_mx_")}


class Want(Enum):
    """What a quantiser writes of one direction, besides its scales."""

    CODES = auto()
    VALUES = auto()  # BF16 values alone; codes instead where the values would lose something
    BOTH = auto()

    @property
    def codes(self) -> bool:
        """Whether codes are written."""
        return self is not Want.VALUES

    @property
    def values(self) -> bool:
        """Whether BF16 values are written."""
        return self is not Want.CODES


class Quantized(NamedTuple):
    """Scales of one direction, codes and BF16 values as wanted; values are None where they would lose something."""

    codes: Tensor | None
    scales: Tensor
    values: Tensor | None


@cache
def _load() -> tuple[ctypes.CDLL | None, KernelStatus]:
    library, status = build()
    if library is None:
        return None, status
    try:
        loaded = ctypes.CDLL(str(library))
        for name, arguments in _SIGNATURES.items():
            function = getattr(loaded, name)
            function.argtypes = arguments
            function.restype = _C if name in _INT_RESULT else None
    except (OSError, AttributeError) as error:
        return None, failed(status.compiler, f"{library} cannot be loaded: {error}")
    keep_freed_pages()
    return loaded, status


def status() -> KernelStatus:
    """Which path runs on CPU tensors, and why; compiles the kernels if that has not happened yet."""
    return _load()[1]


def usable(*tensors: Tensor) -> bool:
    """True if the kernels are there and all tensors are plain ones on the CPU."""
    for tensor in tensors:
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.device.type != "cpu":
            return False
    return _load()[0] is not None and not torch.compiler.is_compiling()


def call(name: str, *arguments: Any) -> int:
    """A kernel by name, with the number of threads as its last argument; its flags."""
    library = _load()[0]
    assert library is not None  # callers ask `usable` first
    return getattr(library, name)(*arguments, torch.get_num_threads()) or 0


def buffer(shape: int | Sequence[int], dtype: torch.dtype) -> Tensor:
    """An uninitialised tensor that a kernel writes to: on the CPU and of this dtype, whatever torch's defaults are."""
    return torch.empty(shape, dtype=dtype, device="cpu")


LARGE = 1 << 19
"""Elements from which on a gradient is written past the caches."""


def widened(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x.to(dtype)`, with a kernel for large BF16 tensors that become FP32."""
    widens = x.dtype is torch.bfloat16 and dtype is torch.float32
    if not widens or x.numel() < LARGE or not x.is_contiguous() or not usable(x):
        return x.to(dtype)
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    if out.data_ptr() % 64:
        return out.copy_(x)
    call("quaver_widen", x.data_ptr(), x.numel(), out.data_ptr())
    return out


def _dense(tensor: Tensor | None) -> Tensor | None:
    """A kernel follows an address, not strides."""
    return None if tensor is None else tensor.contiguous()


def _at(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def quantize(
    x: Tensor,
    *,
    rceil: bool,
    row: Want | None = None,
    col: Want | None = None,
    ends: Tensor | None = None,
    index: Tensor | None = None,
) -> tuple[Quantized | None, Quantized | None]:
    """MXFP8 along the last axis (row), the one before (col), or both in one read.

    Args:
        x: FP32 or BF16, at least 2-D ([*, A, B]; col blocks restart at each leading index), any strides.
        rceil: the "rceil" scale rule, else "floor".
        row, col: what is wanted of each direction; None: nothing.
        ends: of a 2-D `x`: cumulative row counts of groups at which col blocks restart, int64 on the CPU.
        index: of a 2-D `x`: int64 rows to quantise instead of all, as `x.index_select(0, index)` would give.

    Returns:
        (row, col); `values` is None where a block is not made of normal BF16 numbers.
    """
    x, ends, index = x.detach(), _dense(ends), _dense(index)
    if x.stride(-1) != 1 or (x.dim() != 2 and not x.is_contiguous()):
        x = x.contiguous()
    cols = x.shape[-1]
    inner = x.shape[-2] if index is None else index.numel()
    shape = x.shape if index is None else torch.Size((inner, cols))
    rows = shape[:-1].numel()
    groups = rows // inner if inner else 0
    col_scales_shape = torch.Size((*shape[:-2], -(-inner // mxfp8.BLOCK), cols))
    if ends is not None:
        groups = ends.numel()
        col_scales_shape = torch.Size((_blocks(ends.tolist()), cols))
    row_scales_shape = torch.Size((*shape[:-1], -(-cols // mxfp8.BLOCK)))
    pitch = x.stride(0) if x.dim() == 2 else cols
    arguments = (_at(x), x.dtype is torch.float32, cols, pitch, _at(index), _at(ends), groups, inner, rceil)
    return _run("quaver_mx_quantize", arguments, shape, (row, row_scales_shape), (col, col_scales_shape))


def quantize_computed(
    inputs: ctypes.Structure,
    shape: torch.Size,
    *,
    rceil: bool,
    row: Want | None,
    col: Want | None,
    ends: Tensor | None,
) -> tuple[Quantized | None, Quantized | None]:
    """As `quantize`, of a BF16 tensor [rows, cols] that the kernel computes from `inputs` (see experts.py)."""
    rows, cols = shape
    ends = _dense(ends)
    blocks = _blocks([rows] if ends is None else ends.tolist())
    row_side = (row, torch.Size((rows, -(-cols // mxfp8.BLOCK))))
    groups = 1 if ends is None else ends.numel()
    arguments = (ctypes.byref(inputs), _at(ends), groups, rows, rceil)
    return _run("quaver_mx_experts", arguments, shape, row_side, (col, torch.Size((blocks, cols))))


def _blocks(ends: list[int]) -> int:
    """Column blocks of groups that end there: the last of `mxfp8.group_scale_ends`, without its tensors."""
    return sum(-(-(end - start) // mxfp8.BLOCK) for start, end in pairwise([0, *ends]))


_Side = tuple[Want | None, torch.Size]  # what is wanted, and the shape of its scales


def _run(
    name: str, arguments: tuple[Any, ...], shape: torch.Size, row: _Side, col: _Side
) -> tuple[Quantized | None, Quantized | None]:
    """Calls a quantiser, and once more for the codes of a side whose values alone were wanted but are of no use."""
    first, second = _buffers(shape, *row), _buffers(shape, *col)
    flags = call(name, *arguments, *map(_at, first), *map(_at, second)) if shape.numel() else 0
    sides = [_quantized(first, bool(flags & 1)), _quantized(second, bool(flags & 2))]
    lost = [side is not None and side.codes is None and side.values is None for side in sides]
    if any(lost):
        again = _run(
            name,
            arguments,
            shape,
            (Want.CODES if lost[0] else None, row[1]),
            (Want.CODES if lost[1] else None, col[1]),
        )
        sides = [new if one_lost else old for old, new, one_lost in zip(sides, again, lost)]
    return sides[0], sides[1]


_Buffers = tuple[Tensor | None, Tensor | None, Tensor | None]


def _buffers(shape: torch.Size, want: Want | None, scales: torch.Size) -> _Buffers:
    if want is None:
        return None, None, None
    return (
        buffer(shape, torch.uint8) if want.codes else None,
        buffer(scales, torch.uint8),
        buffer(shape, torch.bfloat16) if want.values else None,
    )


def _quantized(buffers: _Buffers, unsafe: bool) -> Quantized | None:
    codes, scales, values = buffers
    return None if scales is None else Quantized(codes, scales, None if unsafe else values)


def ends_fit(ends: Tensor, rows: int) -> bool:
    """True of cumulative group ends that a kernel may follow: int64 on the CPU, ascending, the last one `rows`."""
    if ends.dtype is not torch.int64 or ends.dim() != 1 or ends.numel() == 0 or not usable(ends):
        return False
    found: list[int] = ends.tolist()
    return found[0] >= 0 and found[-1] == rows and all(a <= b for a, b in pairwise(found))


def decode_rows(codes: Tensor, scales: Tensor) -> Tensor | None:
    """BF16 values of MXFP8 codes [*, K] in row blocks; None where BF16 would lose something."""
    codes, scales = codes.contiguous(), scales.contiguous()
    out = buffer(codes.shape, torch.bfloat16)
    if out.numel() == 0:
        return out
    unsafe = call("quaver_mx_decode_rows", _at(codes), _at(scales), codes.shape[:-1].numel(), codes.shape[-1], _at(out))
    return None if unsafe else out


def decode_columns(codes: Tensor, scales: Tensor, ends: Tensor | None = None) -> Tensor | None:
    """BF16 values of MXFP8 codes [*, A, B] in column blocks, restarting at `ends`; None where BF16 would lose."""
    codes, scales, ends = codes.contiguous(), scales.contiguous(), _dense(ends)
    out = buffer(codes.shape, torch.bfloat16)
    if out.numel() == 0:
        return out
    inner, cols = codes.shape[-2:]
    groups = codes.shape[:-2].numel() if ends is None else ends.numel()
    unsafe = call(
        "quaver_mx_decode_columns", _at(codes), _at(scales), cols, _at(ends), groups, inner, _at(out)
    )
    return None if unsafe else out


def pack_into(codes: Tensor, scales: Tensor, *, columns: bool, address: int) -> bool:
    """Decodes a weight straight into oneDNN's blocked order at `address`; False where BF16 would lose something.

    Args:
        codes: contiguous [features, contracted], or with `columns` [contracted, features]; multiples of 64.
        scales: contiguous, blocks along `contracted`.
        columns: blocks run down the columns.
        address: of features * contracted BF16 values.
    """
    name = "quaver_mx_pack_columns" if columns else "quaver_mx_pack_rows"
    return not call(name, _at(codes), _at(scales), 1, codes.shape[0], codes.shape[1], address)


def amax(x: Tensor) -> Tensor:
    """FP32 largest magnitude: 0-d of a 2-D tensor, [E] of a 3-D one; 0 where empty, NaN if there is one."""
    x = x.detach().contiguous()
    batch = x.shape[0] if x.dim() == 3 else 1
    out = buffer(batch, torch.float32).zero_()
    if x.numel():
        call("quaver_amax", _at(x), x.dtype is torch.float32, batch, x.numel() // batch, _at(out))
    return out if x.dim() == 3 else out[0]


def hif8_scales(x: Tensor, format_max: float) -> Tensor:
    """FP32 scales as `hif8.scale_from_amax` of `amax` gives them: 0-d of a 2-D tensor, [E] of a 3-D one."""
    x = x.detach().contiguous()
    batch = x.shape[0] if x.dim() == 3 else 1
    if not x.numel():
        return buffer(batch if x.dim() == 3 else (), torch.float32).fill_(1.0)
    out = buffer(batch if x.dim() == 3 else (), torch.float32)
    call("quaver_hif8_scales", _at(x), x.dtype is torch.float32, batch, x.numel() // batch, format_max, _at(out))
    return out


def hif8_quantize(x: Tensor, scale: Tensor, *, want: Want) -> Quantized:
    """HiF8 codes of x / scale and their BF16 values, as wanted; one FP32 scale, or one per leading index of 3-D."""
    x, scale = x.detach().contiguous(), scale.contiguous()
    codes = buffer(x.shape, torch.uint8) if want.codes else None
    decoded = buffer(x.shape, torch.bfloat16) if want.values else None
    batch = scale.numel()
    if x.numel():
        table = hif8.decode_table(torch.bfloat16)
        arguments = (_at(x), x.dtype is torch.float32, batch, x.numel() // batch, _at(scale))
        call("quaver_hif8_encode", *arguments, _at(codes), _at(decoded), _at(table))
    return Quantized(codes, scale, decoded)


def hif8_decode(codes: Tensor) -> Tensor:
    """BF16 values of HiF8 codes, contiguous."""
    codes = codes.contiguous()
    out = buffer(codes.shape, torch.bfloat16)
    call("quaver_hif8_decode", _at(codes), codes.numel(), _at(hif8.decode_table(torch.bfloat16)), _at(out))
    return out


def hif8_decode_transposed(codes: Tensor) -> Tensor:
    """BF16 values of HiF8 codes [*, A, B] as contiguous [*, B, A]."""
    codes = codes.contiguous()
    *leading, rows, cols = codes.shape
    out = buffer((*leading, cols, rows), torch.bfloat16)
    batch = codes.shape[:-2].numel()
    table = hif8.decode_table(torch.bfloat16)
    call("quaver_hif8_decode_transposed", _at(codes), batch, rows, cols, _at(table), _at(out))
    return out


def forget() -> None:
    """Reads the environment anew at the next use: for tests of the two paths in one process."""
    _load.cache_clear()


