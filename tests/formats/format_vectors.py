"""Reading the golden vectors of the codec tests: see tests/golden/formats/README.md."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

GOLDEN = Path(__file__).parents[1] / "golden" / "formats"


def tensor_from_bits(bits: np.ndarray) -> Tensor:
    """uint32 bit patterns -> float32, uint16 -> bfloat16; NaN payloads untouched."""
    if bits.dtype == np.uint32:
        return torch.from_numpy(bits.view(np.int32).copy()).view(torch.float32)
    assert bits.dtype == np.uint16
    return torch.from_numpy(bits.view(np.int16).copy()).view(torch.bfloat16)


def read_csv(name: str) -> dict[str, list[str]]:
    with (GOLDEN / name).open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {key: [row[key] for row in rows] for key in rows[0]}


def hex_bytes(column: list[str]) -> np.ndarray:
    return np.array([int(cell, 16) for cell in column], dtype=np.uint8)


def hex_words(column: list[str]) -> np.ndarray:
    return np.array([int(cell, 16) for cell in column], dtype=np.uint32)


def sqnr_db(x: Tensor, y: Tensor) -> float:
    """Signal to quantisation noise, in dB."""
    noise = (x.double() - y.double()).square().sum()
    return (10 * torch.log10(x.double().square().sum() / noise)).item()
