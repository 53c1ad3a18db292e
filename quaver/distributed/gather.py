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
    """What came back from a gather is not what was sent: number, order, shape, dtype or this rank's own part."""


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
    """Gathered tensors by field name; GatherError if number, shape or dtype differ.

    That tells an order of tensors that are alike in neither; `check_own_part` tells any other.
    """
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


def check_own_part(
    outputs: tuple[torch.Tensor, ...],
    sent: tuple[torch.Tensor, ...],
    metadata: GatherMetadata,
    rank: int,
    fqn: str,
) -> bool:
    """Holds this rank's part of each gathered tensor against what it sent, bit for bit.

    Two fields of one shape and dtype that came back in each other's place, or ranks in another order, are seen
    here alone. It reads every value and waits for the device, so it is meant for a first gather, not for each.

    Args:
        outputs: what came back, [ranks * n, ...] each.
        sent: what this rank sent, [n, ...] each, in the order of the metadata.
        metadata: of this gather.
        rank: this rank's number in the shard group.
        fqn: the parameter, for the error.

    Returns:
        True if this settles the order: no two fields that could be taken for each other hold the same values.

    Raises:
        GatherError: naming the field.
    """
    fields = check_outputs(outputs, metadata, fqn)
    own = dict(zip(fields, sent, strict=True))
    for name, local in own.items():
        rows = local.shape[0] if local.ndim else 1
        part = fields[name][rank * rows : (rank + 1) * rows].reshape(local.shape)
        if not _same_bits(part, local):
            taken = next((o for o, t in own.items() if o != name and _same_bits(part, t)), None)
            raise GatherError(
                f"rank {rank}'s own part of the gathered {name} is "
                + (f"its {taken}" if taken else "not what it sent"),
                where=fqn,
                remedy="the collective library, or what lies between the two hooks of the gather, mixes up order",
            )
    names = list(own)
    return not any(
        _same_bits(own[one], own[other]) for i, one in enumerate(names) for other in names[i + 1 :]
    )


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True for one shape, one dtype and one pattern of bits; a NaN equals itself."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
