"""The gather protocol: how a tensor with several physical storages goes through FSDP, knowing no format.

A local shard answers `pre_all_gather(context)` with the physical tensors of this phase and plain metadata, and
rebuilds the whole from what arrives in `post_all_gather`. What torch passes and hides is translated one file
further, in fsdp.py. May import: torch, errors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from quaver.errors import QuaverError

Phase = Literal["forward", "backward"]


class GatherError(QuaverError):
    """What came back from a gather is not what was sent: number, order, shape or dtype."""


@dataclass(frozen=True)
class FSDPGatherContext:
    """What a shard may know of the gather that it takes part in."""

    phase: Phase
    reshard_after_forward: bool
    param_fqn: str


@dataclass(frozen=True)
class PhysicalSchema:
    """One physical tensor of a gather: its name, shape per rank, and dtype (as a string: plain data)."""

    field: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class GatherMetadata:
    """Plain, serialisable description of one gather.

    Args:
        sent: schema of each gathered tensor, in order, as one rank sends it.
        logical_shape: shape of the whole tensor.
        world_size: ranks of the shard group.
        version: refresh count of the shard's cache; a reader can tell one refresh from the next.
    """

    sent: tuple[PhysicalSchema, ...]
    logical_shape: tuple[int, ...]
    world_size: int
    version: int


PROTOCOL = ("pre_all_gather", "post_all_gather")


class FSDPLocalTensorExtension(Protocol):
    """What a local shard must offer to be gathered as several physical tensors. Plain tensors do not."""

    def pre_all_gather(
        self, context: FSDPGatherContext, logical_shape: torch.Size, world_size: int
    ) -> tuple[tuple[torch.Tensor, ...], GatherMetadata]:
        """Physical tensors of this phase, each shardable on dim 0, and metadata."""

    def post_all_gather(
        self,
        outputs: tuple[torch.Tensor, ...],
        metadata: GatherMetadata,
        out: Any = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> torch.Tensor:
        """The whole logical tensor, of the dtype that FSDP's policy gives its unit's parameters (and so their
        gradients); with `out` its physical tensors are swapped in place and `out` returned."""


def schema_of(fields: dict[str, torch.Tensor]) -> tuple[PhysicalSchema, ...]:
    """Schemas of named physical tensors, in order."""
    return tuple(
        PhysicalSchema(k, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for k, t in fields.items()
    )


def check_outputs(
    outputs: tuple[torch.Tensor, ...], metadata: GatherMetadata, fqn: str
) -> dict[str, torch.Tensor]:
    """Gathered tensors by field name; GatherError if number, order (by shape and dtype), shape or dtype differ."""
    if len(outputs) != len(metadata.sent):
        raise GatherError(
            f"gathered {len(outputs)} physical tensors, {len(metadata.sent)} were sent",
            where=f"{fqn}: {[s.field for s in metadata.sent]}",
        )
    fields = {}
    for tensor, sent in zip(outputs, metadata.sent):
        wanted = (
            (sent.shape[0] * metadata.world_size, *sent.shape[1:]) if sent.shape else (metadata.world_size,)
        )
        dtype = str(tensor.dtype).removeprefix("torch.")
        if tuple(tensor.shape) != wanted or dtype != sent.dtype:
            raise GatherError(
                f"gathered {sent.field} is {dtype} {tuple(tensor.shape)}, wanted {sent.dtype} {wanted}",
                where=fqn,
            )
        fields[sent.field] = tensor
    return fields
