"""The process group and the mesh; one process needs no launcher. May import: torch, errors."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from quaver.errors import ConfigError, QuaverError

T = TypeVar("T")
COLLECTIVES = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}
TIMEOUT = timedelta(minutes=10)


def launched_world_size() -> int:
    """Ranks that torchrun started, 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_ranks() -> int:
    """Ranks of this machine, as a launcher announced them; 1 without one."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def world_size() -> int:
    """Ranks of the process group, or those that a launcher announced before there is one."""
    return dist.get_world_size() if dist.is_initialized() else launched_world_size()


def init_world(device_type: str = "cpu") -> bool:
    """Starts the default process group once: torchrun's, or with one process one over an in-memory store.

    Returns:
        True if it was started here: who starts a group ends it (`leave_world`); False if there was one.
    """
    if dist.is_initialized():
        return False
    # counts, decisions and checkpoints travel as CPU tensors whatever the device
    library = "gloo" if device_type == "cpu" else f"cpu:gloo,{device_type}:{COLLECTIVES[device_type]}"
    if launched_world_size() > 1:
        dist.init_process_group(library, timeout=TIMEOUT)
    else:
        dist.init_process_group(library, store=dist.HashStore(), rank=0, world_size=1)
    return True


def leave_world() -> None:
    """Ends the process group, if there is one; what still holds a group must have let go of it."""
    if dist.is_initialized():
        dist.destroy_process_group()


def rank() -> int:
    """This process's rank; 0 before the process group exists and without a launcher."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def on_rank_zero(make: Callable[[], T]) -> T:
    """Runs `make` on rank 0 alone and gives its result to every rank; an error there is raised on all.

    For decisions about the file system, which must be taken once.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return make()
    box: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            box[0] = make()
        except QuaverError as error:
            box[1] = error
    dist.broadcast_object_list(box, src=0)
    if box[1] is not None:
        raise box[1]
    return box[0]


def gather_rows(row: torch.Tensor) -> torch.Tensor:
    """[n] of each rank -> [ranks, n] in rank order, on every rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return row.unsqueeze(0)
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, row)
    return torch.stack(rows)


def shard_mesh(dp_shard_size: int | None, device_type: str = "cpu") -> DeviceMesh:
    """The data-parallel mesh; ConfigError unless `dp_shard_size` divides the number of ranks."""
    world = dist.get_world_size()
    size = check_shard_size(dp_shard_size, world)
    if size == world:
        return init_device_mesh(device_type, (world,), mesh_dim_names=("shard",))
    return init_device_mesh(device_type, (world // size, size), mesh_dim_names=("replicate", "shard"))


def check_shard_size(dp_shard_size: int | None, world: int) -> int:
    """The shard group's size for `world` ranks; None means all of them."""
    size = world if dp_shard_size is None else dp_shard_size
    if world % size:
        raise ConfigError(
            f"dp_shard_size {size} does not divide the number of ranks {world}",
            where="fsdp_config.dp_shard_size",
            remedy=f"start {size} ranks or a multiple (--nproc {size}), or set dp_shard_size to null or a "
            f"divisor of {world}",
        )
    return size
