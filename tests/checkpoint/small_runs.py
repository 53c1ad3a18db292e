"""A run of a few hundred parameters with every kind that a checkpoint must get right; needs no transformers.

Rows that no number of ranks divides, a single row, a frozen parameter, one that never gets a gradient, buffers of
three kinds, a loader and router counts.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from quaver.checkpoint import TrainState, model_view, optimizer_view
from quaver.distributed import PARAMS_BF16, local_tensor, shard_module


class Small(nn.Module):
    """Seven rows, five rows, one row; `frozen` does not train and `unused` trains but never gets a gradient."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.first = nn.Linear(width, 7)
        self.second = nn.Linear(7, 5, bias=False)
        self.row = nn.Parameter(torch.randn(1, 5))
        self.frozen = nn.Parameter(torch.randn(3, 5), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(4, 2))
        self.balance = nn.Buffer(torch.randn(4))
        self.count = nn.Buffer(torch.arange(3))
        self.table = nn.Buffer(torch.randn(4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, width] -> scalar."""
        return (
            ((self.second(torch.tanh(self.first(x))) * self.row) @ self.frozen.T.to(x.dtype)).square().mean()
        )


class Cursor:
    """A loader's state, without the loader."""

    def __init__(self) -> None:
        self.cursor = 0

    def state_dict(self) -> dict[str, Any]:
        """As the loader's."""
        return {"cursor": self.cursor, "digest": "corpus"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As the loader's."""
        self.cursor = state["cursor"]


class Counts:
    """Router counts, without a router."""

    def __init__(self) -> None:
        self.rows = {"layers.0.mlp": torch.zeros(4, dtype=torch.int64)}

    def state_dict(self) -> Mapping[str, torch.Tensor]:
        """As the router bias's."""
        return self.rows

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """As the router bias's."""
        assert state.keys() == self.rows.keys()
        self.rows = dict(state)


def small_run(mesh: DeviceMesh | None = None, *, seed: int = 0, width: int = 6, **changes: Any) -> TrainState:
    """A run that has not started; the same seed gives the same whole weights on any number of ranks."""
    torch.manual_seed(seed)
    model = Small(width)
    if mesh is not None:
        shard_module(model.first, mesh, reshard_after_forward=True, mp_policy=PARAMS_BF16)
        shard_module(model, mesh, reshard_after_forward=True, mp_policy=PARAMS_BF16)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, fused=True)
    facts = {"recipe": None, "config_digest": "config", "tokenizer_digest": "tokenizer", "progress": {}}
    return TrainState(
        model=model, optimizer=optimizer, loader=Cursor(), router_bias=Counts(), **(facts | changes)
    )


def train_steps(state: TrainState, steps: int, *, seed: int = 1) -> list[float]:
    """A few steps whose inputs come from the global generators, so that their states matter; returns the losses."""
    losses = []
    for _ in range(steps):
        x = torch.randn(3, 6) + float(np.random.standard_normal()) + random.gauss(0.0, 1.0)
        dtype = torch.bfloat16 if hasattr(state.model, "reshard") else torch.float32
        loss = state.model(x.to(dtype))
        loss.backward()
        state.optimizer.step()
        state.optimizer.zero_grad()
        with torch.no_grad():
            state.model.get_buffer("balance").add_(0.125)
        state.loader.cursor += 3
        losses.append(float(loss.detach()))
    return losses


def scatter_generators(seed: int) -> None:
    """Three generators in three unlike states, each with a half-used pair of normal numbers."""
    random.seed(seed)
    np.random.seed(seed + 1)
    torch.manual_seed(seed + 2)
    random.gauss(0.0, 1.0), np.random.standard_normal(), torch.randn(3)


def next_numbers() -> list[float]:
    """What each generator gives next; the gaussians come from the held half of a pair."""
    return [
        random.gauss(0.0, 1.0),
        random.random(),
        float(np.random.standard_normal()),
        float(np.random.rand()),
        float(torch.randn(())),
        float(torch.rand(())),
    ]


def tensors(state: TrainState) -> dict[str, torch.Tensor]:
    """All that a checkpoint holds of a run, whole, copied: an oracle for comparisons."""
    views = {f"model.{k}": v for k, v in model_view(state.model).items()}
    views |= {f"optim.{k}": v for k, v in optimizer_view(state.model, state.optimizer).items()}
    return {
        k: (v.full_tensor() if hasattr(v, "full_tensor") else local_tensor(v)).clone()
        for k, v in views.items()
    }


def differing(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    """Keys that are not in both, or whose bits, dtype or shape differ."""
    both = a.keys() & b.keys()
    same = {k for k in both if a[k].dtype is b[k].dtype and torch.equal(a[k], b[k])}
    return sorted((a.keys() | b.keys()) - same)
