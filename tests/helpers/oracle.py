"""An independent oracle: the two formats by third-party dtypes (ml_dtypes, en_dtypes), the GEMMs in FP64.

Nothing here uses quaver.formats, so that a wrong codec and a wrong GEMM cannot agree with each other.
"""

from __future__ import annotations

import en_dtypes
import ml_dtypes
import numpy as np
import torch

from quaver.backends import QuantizedOperand

MX_ELEMENT = np.dtype(ml_dtypes.float8_e4m3fn)
HIF8_ELEMENT = np.dtype(en_dtypes.hifloat8)
GRADIENT_MAX, FORWARD_MAX = 224.0, 15.0


def mx_fake_quant(x: torch.Tensor, axis: int, rule: str = "floor") -> torch.Tensor:
    """FP64 values of x after MXFP8 along `axis`, blocks of 32 from the front; finite input only."""
    wide = np.moveaxis(x.detach().double().numpy(), axis, -1)
    out = np.empty_like(wide)
    for start in range(0, wide.shape[-1], 32):
        block = wide[..., start : start + 32]
        amax = np.abs(block).max(-1, keepdims=True)
        with np.errstate(divide="ignore"):
            exponent = np.frexp(amax)[1] - 1 - 8 if rule == "floor" else np.ceil(np.log2(amax / 448.0))
        scale = np.ldexp(1.0, np.clip(np.where(amax > 0, exponent, -127), -127, 127).astype(int))
        codes = np.clip(block / scale, -448, 448).astype(np.float32).astype(MX_ELEMENT)
        out[..., start : start + 32] = codes.astype(np.float64) * scale
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(out, -1, axis)))


def hif8_fake_quant(x: torch.Tensor, format_max: float) -> torch.Tensor:
    """FP64 values of x after HiF8 with one scale amax / format_max; finite input only."""
    wide = x.detach().float().numpy()
    amax = np.float32(np.abs(wide).max()) if wide.size else np.float32(0)
    scale = amax / np.float32(format_max)
    scale = scale if scale > 0 else np.float32(1)
    codes = (wide / scale).astype(HIF8_ELEMENT)
    return torch.from_numpy(codes.astype(np.float64) * np.float64(scale))


def decode(operand: QuantizedOperand, ends: list[int] | None = None) -> torch.Tensor:
    """FP64 values of an operand; `ends` for a token axis whose blocks restart at each group."""
    codes = operand.data.contiguous().numpy()
    if operand.format == "hif8":
        scale = operand.scale.double()
        scale = scale.view(-1, 1, 1) if scale.ndim == 1 else scale
        return torch.from_numpy(codes.view(HIF8_ELEMENT).astype(np.float64)) * scale
    values = torch.from_numpy(codes.view(MX_ELEMENT).astype(np.float64))
    exponents = operand.scale.double() - 127
    scale = torch.where(operand.scale == 255, torch.nan, torch.exp2(exponents))
    axis = values.ndim - (1 if operand.orientation == "row" else 2)
    return values * scale.index_select(axis, _block_of(values.shape[axis], ends))


def _block_of(length: int, ends: list[int] | None) -> torch.Tensor:
    """Index of the scale of each element along the blocked axis."""
    owners, blocks, start = [], 0, 0
    for end in [length] if ends is None else ends:
        owners += [blocks + i // 32 for i in range(end - start)]
        blocks, start = blocks + -(-(end - start) // 32), end
    return torch.tensor(owners, dtype=torch.int64)


def fake_quant(x: torch.Tensor, axis: int, recipe: str, *, gradient: bool = False) -> torch.Tensor:
    """FP64 values of x under a recipe's rule for one role; `axis` is the contracted one."""
    if recipe.startswith("hif8"):
        return hif8_fake_quant(x, GRADIENT_MAX if gradient else FORWARD_MAX)
    return mx_fake_quant(x, axis, recipe.split("/")[2].removesuffix("@1"))


def within_bound(y: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Per element: |y - a b| <= 2^-8 |a b| (BF16 outputs only) + K 2^-24 |a| |b|, in FP64."""
    exact, magnitude = a @ b, a.abs() @ b.abs()
    bound = a.shape[-1] * 2.0**-24 * magnitude
    if y.dtype is torch.bfloat16:
        bound = bound + 2.0**-8 * exact.abs()
    return (y.double() - exact).abs() <= bound


def sqnr_db(exact: torch.Tensor, found: torch.Tensor) -> float:
    """10 log10 of signal over noise power."""
    noise = (exact.double() - found.double()).pow(2).mean()
    return float(10 * torch.log10(exact.double().pow(2).mean() / noise))
