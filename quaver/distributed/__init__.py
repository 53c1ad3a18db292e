"""Ranks, mesh, and FSDP2 with tensors of several physical storages; this room knows no format.

Reading order: gather.py (the protocol), fsdp.py (torch's private parts, guarded), world.py.
"""

from quaver.distributed.fsdp import (
    PARAMS_BF16,
    PARAMS_FP32,
    FSDPBinding,
    FSDPExtension,
    bind,
    is_sharded,
    lazy_init,
    like_sharded,
    local_tensor,
    reshard_all,
    set_gradient_sync,
    shard_module,
    sum_replicated,
)
from quaver.distributed.gather import (
    FSDPGatherContext,
    FSDPLocalTensorExtension,
    GatherError,
    GatherMetadata,
    PhysicalSchema,
    check_outputs,
    schema_of,
)
from quaver.distributed.world import (
    check_shard_size,
    gather_rows,
    init_world,
    launched_world_size,
    leave_world,
    local_ranks,
    on_rank_zero,
    rank,
    shard_mesh,
    world_size,
)

__all__ = [
    "PARAMS_BF16",
    "PARAMS_FP32",
    "FSDPBinding",
    "FSDPExtension",
    "FSDPGatherContext",
    "FSDPLocalTensorExtension",
    "GatherError",
    "GatherMetadata",
    "PhysicalSchema",
    "bind",
    "check_outputs",
    "check_shard_size",
    "gather_rows",
    "init_world",
    "is_sharded",
    "launched_world_size",
    "lazy_init",
    "leave_world",
    "like_sharded",
    "local_ranks",
    "local_tensor",
    "on_rank_zero",
    "rank",
    "reshard_all",
    "schema_of",
    "set_gradient_sync",
    "shard_mesh",
    "shard_module",
    "sum_replicated",
    "world_size",
]
