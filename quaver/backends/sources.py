"""Tensors that need not exist: what the routed experts quantise, as the computation that gives it.

`tensor()` is the definition, in torch's own operators, and what a backend without kernels quantises. The CPU kernels
compute the same bits row by row while they quantise. May import: torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor


@runtime_checkable
class RowSource(Protocol):
    """A tensor [rows, cols] that is given by a computation."""

    @property
    def shape(self) -> torch.Size:
        """Of the tensor."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the tensor."""

    def tensor(self) -> Tensor:
        """The tensor itself."""


def as_tensor(tensor: Tensor | RowSource) -> Tensor:
    """The tensor that a source stands for, or the tensor itself."""
    return tensor if isinstance(tensor, Tensor) else tensor.tensor()


@dataclass(frozen=True)
class GatheredRows:
    """x.index_select(0, index): x [T, K], index int64 [S]."""

    x: Tensor
    index: Tensor

    @property
    def shape(self) -> torch.Size:
        """[S, K]."""
        return torch.Size((self.index.numel(), self.x.shape[1]))

    @property
    def dtype(self) -> torch.dtype:
        """Of x."""
        return self.x.dtype

    def tensor(self) -> Tensor:
        """The rows, copied."""
        return self.x.index_select(0, self.index)


@dataclass(frozen=True)
class ScaledRows:
    """Gathered rows times an FP32 weight each, in FP32, rounded once: g [T, N], index int64 [S], weight FP32 [S]."""

    g: Tensor
    index: Tensor
    weight: Tensor

    @property
    def shape(self) -> torch.Size:
        """[S, N]."""
        return torch.Size((self.index.numel(), self.g.shape[1]))

    @property
    def dtype(self) -> torch.dtype:
        """Of g."""
        return self.g.dtype

    def tensor(self) -> Tensor:
        """The rows."""
        scaled = self.g.index_select(0, self.index).float() * self.weight.unsqueeze(1)
        return scaled.to(self.dtype)


@dataclass(frozen=True)
class SwiGLU:
    """silu(gate) * up, where h [S, 2F] = [gate, up]."""

    h: Tensor

    @property
    def shape(self) -> torch.Size:
        """[S, F]."""
        return torch.Size((self.h.shape[0], self.h.shape[1] // 2))

    @property
    def dtype(self) -> torch.dtype:
        """Of h."""
        return self.h.dtype

    def tensor(self) -> Tensor:
        """The activations."""
        gate, up = self.h.chunk(2, -1)
        return F.silu(gate) * up


@dataclass(frozen=True)
class SwiGLUGradient:
    """The gradient of h [S, 2F] for da [S, F], that of silu(gate) * up."""

    da: Tensor
    h: Tensor

    @property
    def shape(self) -> torch.Size:
        """[S, 2F]."""
        return self.h.shape

    @property
    def dtype(self) -> torch.dtype:
        """Of h."""
        return self.h.dtype

    def tensor(self) -> Tensor:
        """[d gate, d up]."""
        gate, up = self.h.chunk(2, -1)
        return torch.cat([torch.ops.aten.silu_backward(self.da * up, gate), self.da * F.silu(gate)], -1)
