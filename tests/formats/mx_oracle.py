"""MXFP8 worked out a second way: float64 arithmetic and ml-dtypes, block by block along the last axis."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import torch
from torch import Tensor


def scale_exponent(amax: np.ndarray, rule: str) -> np.ndarray:
    """Exponents by frexp on exact float64 values; every FP32 number is one."""
    fraction, exponent = np.frexp(amax)  # amax = fraction * 2^exponent, fraction in [0.5, 1)
    scale = exponent - 9 + ((fraction > 0.875) if rule == "rceil" else 0)
    return np.where(amax == 0, -127, np.maximum(scale, -127))


def encode(x: np.ndarray, exponent: np.ndarray) -> np.ndarray:
    """E4M3 bytes of float64 x / 2^exponent, saturating."""
    scaled = np.clip(np.ldexp(x, -exponent.astype(np.int64)), -448, 448)
    return scaled.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)


def quantize(x: Tensor, rule: str) -> tuple[np.ndarray, np.ndarray]:
    """Codes [..., n] and scale bytes [..., ceil(n/32)]; NaN and Inf blocks by Quaver's policy."""
    values = x.double().numpy()
    short = -values.shape[-1] % 32
    padded = np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, short)])
    blocks = padded.reshape(*values.shape[:-1], padded.shape[-1] // 32, 32)
    broken = ~np.isfinite(blocks).all(-1)
    finite = np.where(broken[..., None], 0.0, blocks)
    exponent = scale_exponent(np.abs(finite).max(-1, initial=0.0), rule)
    codes = np.where(broken[..., None], 0, encode(finite, exponent[..., None]))
    codes = codes.reshape(padded.shape)[..., : values.shape[-1]].astype(np.uint8)
    return codes, np.where(broken, 255, exponent + 127).astype(np.uint8)


def dequantize(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """float64 values of codes [..., n] and scales [..., ceil(n/32)], by ml-dtypes."""
    elements = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    per_block = scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    return elements * np.repeat(per_block, 32, axis=-1)[..., : codes.shape[-1]]


def as_torch(pair: tuple[np.ndarray, np.ndarray]) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(pair[0].copy()), torch.from_numpy(pair[1].copy())
