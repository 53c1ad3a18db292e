"""Where a shard's rows lie in the whole weight, and what its ranks must agree on before they quantise.

A per-tensor scale is the scale of the whole tensor, and a block of 32 rows that lies on two ranks has one scale:
both come from a maximum over the shard group, of FP32 amax or of uint8 exponents. May import: torch, distributed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from quaver.errors import PlanError
from quaver.formats import mxfp8


@dataclass(frozen=True)
class Shard:
    """One rank's rows of a weight that is sharded on dim 0.

    Args:
        row0: first row (or expert) of this rank.
        rows: rows of this rank, the same on all.
        total: rows of the whole weight.
        group: the shard group.
    """

    row0: int
    rows: int
    total: int
    group: dist.ProcessGroup

    @property
    def cuts_blocks(self) -> bool:
        """True if shard ends lie inside blocks of 32 rows; the same on every rank of the group."""
        return self.rows % mxfp8.BLOCK != 0

    def maximum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Elementwise maximum over the group, in place; FP32 and uint8 both work in every collective library."""
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.group)
        return tensor


def shard_of(parameter: torch.Tensor, fqn: str) -> Shard | None:
    """The shard that this rank holds of a DTensor parameter; None where one rank holds it whole."""
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is None:
        return None
    size = mesh.size(mesh.ndim - 1)
    if size == 1:
        return None
    total = parameter.shape[0]
    if total % size:
        raise PlanError(
            f"{total} rows do not divide by {size} ranks",
            where=fqn,
            remedy="fsdp_config.fallback_to_unsharded: true",
        )
    rows = total // size
    return Shard(mesh.get_local_rank(mesh.ndim - 1) * rows, rows, total, mesh.get_group(mesh.ndim - 1))
