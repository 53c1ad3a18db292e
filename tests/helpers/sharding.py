"""One rank of FSDP2 in this process, and the smallest sharded models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from quaver.distributed import PARAMS_BF16, init_world, shard_mesh, shard_module
from quaver.low_precision import (
    LowPrecisionModule,
    LowPrecisionPolicy,
    MasterWeight,
    low_precision_grouped_swiglu,
    replace_low_precision_linear,
)


@contextmanager
def one_rank() -> Iterator[DeviceMesh]:
    """The mesh of a one-rank gloo group; ends the group if it started it."""
    mine = not dist.is_initialized()
    init_world()
    try:
        yield shard_mesh(None)
    finally:
        if mine:
            dist.destroy_process_group()


class Experts(LowPrecisionModule):
    """Routed experts with a fixed routing: token t goes to experts t % E and (t + 1) % E."""

    WEIGHTS = {"gate_up_proj": "grouped", "down_proj": "grouped"}  # noqa: RUF012

    def __init__(self, width: int, experts: int, fqn: str, policy: LowPrecisionPolicy) -> None:
        super().__init__()
        self.fqn, self.policy = fqn, policy
        self.gate_up_proj = nn.Parameter(torch.randn(experts, 2 * width, width) * 0.1)
        self.down_proj = nn.Parameter(torch.randn(experts, width, width) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, H] -> [T, H]."""
        tokens, experts = torch.arange(x.shape[0]), self.gate_up_proj.shape[0]
        index = torch.stack([tokens % experts, (tokens + 1) % experts], 1)
        return low_precision_grouped_swiglu(
            x,
            index,
            torch.full(index.shape, 0.5),
            self.gate_up_proj,
            self.down_proj,
            sites=(self.weight_fqn("gate_up_proj"), self.weight_fqn("down_proj")),
            recipe=self.recipe,
        )


class Block(nn.Module):
    """A norm, a dense layer with bias and experts: plain, dense and grouped parameters in one FSDP unit."""

    def __init__(self, width: int, fqn: str, policy: LowPrecisionPolicy) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.proj = replace_low_precision_linear(nn.Linear(width, width), fqn=f"{fqn}.proj", policy=policy)
        self.experts = Experts(width, 4, f"{fqn}.experts", policy)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, H] -> [T, H]."""
        # cast as FSDP casts what it gathers, so that plain parameters are the same numbers with and without it
        normed = nn.functional.rms_norm(x, (x.shape[-1],), self.norm.weight.to(x.dtype))
        x = x + self.proj(normed)
        return x + self.experts(x)


def blocks(policy: LowPrecisionPolicy, *, count: int = 2, width: int = 64, seed: int = 0) -> nn.Sequential:
    """Blocks with random weights, not yet quantised."""
    torch.manual_seed(seed)
    return nn.Sequential(*[Block(width, str(i), policy) for i in range(count)])


def shard(model: nn.Sequential, mesh: DeviceMesh, *, reshard_after_forward: bool = True) -> nn.Sequential:
    """Each block a unit, then the root."""
    for block in model:
        shard_module(block, mesh, reshard_after_forward=reshard_after_forward, mp_policy=PARAMS_BF16)
    shard_module(model, mesh, reshard_after_forward=reshard_after_forward, mp_policy=PARAMS_BF16)
    return model


@dataclass(frozen=True)
class Gathered:
    """One call of pre_all_gather."""

    fqn: str
    phase: str
    reshard_after_forward: bool
    fields: tuple[str, ...]


def record_gathers(monkeypatch: pytest.MonkeyPatch) -> list[Gathered]:
    """Notes every gather of a quantised weight from now on."""
    calls: list[Gathered] = []
    original = MasterWeight.pre_all_gather

    def noted(self, context, logical_shape, world_size):  # type: ignore[no-untyped-def]
        tensors, metadata = original(self, context, logical_shape, world_size)
        fields = tuple(sent.field for sent in metadata.sent)
        calls.append(Gathered(context.param_fqn, context.phase, context.reshard_after_forward, fields))
        return tensors, metadata

    monkeypatch.setattr(MasterWeight, "pre_all_gather", noted)
    return calls
