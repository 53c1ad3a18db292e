"""Inputs on which the kernels must equal the torch codecs: all bit patterns, wide ranges, odd shapes, strides."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

GOLDEN = Path(__file__).parents[2] / "golden" / "formats"
RULES = ("floor", "rceil")
DTYPES = (torch.bfloat16, torch.float32)

SHAPES = [
    (1, 1), (1, 31), (31, 1), (32, 32), (33, 47), (5, 300), (96, 256), (64, 257), (70, 513), (2, 64, 96),
    (3, 33, 65), (0, 32), (32, 0), (0, 33, 64), (3, 0, 64), (2, 5, 0),
]  # fmt: skip


def words(shape: tuple[int, ...], seed: int) -> Tensor:
    """Uniformly random FP32 words: every exponent, subnormals, NaN and Inf."""
    bits = np.random.default_rng(seed).integers(0, 2**32, shape, dtype=np.uint32)
    return torch.from_numpy(bits.view(np.int32).copy()).view(torch.float32)


def wide(shape: tuple[int, ...], seed: int) -> Tensor:
    """Finite values whose exponents span FP32's range, within blocks too."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-148, 127, shape, generator=generator)
    return torch.randn(shape, generator=generator) * torch.exp2(exponents.float())


def ordinary(shape: tuple[int, ...], seed: int) -> Tensor:
    """Gaussian values, with zeros, zero rows and columns, and a few tiny and large ones."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    x[torch.rand(shape, generator=generator) < 0.05] = 0.0
    x[torch.rand(shape, generator=generator) < 0.02] *= 2.0**-20
    x[torch.rand(shape, generator=generator) < 0.02] *= -0.0
    x[..., :33, :40] *= 0.0
    return x


KINDS = {"words": words, "wide": wide, "ordinary": ordinary}


def all_bf16() -> Tensor:
    """Every BF16 bit pattern, [256, 256]."""
    bits = np.arange(65536, dtype=np.uint16).view(np.int16)
    return torch.from_numpy(bits.copy()).view(torch.bfloat16).view(256, 256)


def golden_blocks() -> dict[str, Tensor]:
    """The named MXFP8 blocks of the golden vectors, [1103, 32], by tag."""
    with np.load(GOLDEN / "mxfp8_vectors.npz") as file:
        fp32, bf16 = file["in_fp32_bits"], file["in_bf16_bits"]
    return {
        "fp32": torch.from_numpy(fp32.view(np.int32).copy()).view(torch.float32),
        "bf16": torch.from_numpy(bf16.view(np.int16).copy()).view(torch.bfloat16),
    }


def strided(x: Tensor) -> dict[str, Tensor]:
    """The same values under other strides."""
    taller = torch.zeros(*x.shape[:-1], x.shape[-1] + 7, dtype=x.dtype)
    taller[..., 3 : 3 + x.shape[-1]] = x
    spread = torch.zeros(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype)
    spread[..., ::2] = x
    return {
        "transposed": x.transpose(-1, -2).contiguous().transpose(-1, -2),
        "a slice of columns": taller[..., 3 : 3 + x.shape[-1]],
        "every second element": spread[..., ::2],
        "expanded": x[..., :1, :].expand(x.shape) if x.shape[-2] else x,
    }
