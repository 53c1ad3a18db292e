"""The process group and the mesh; one process needs no launcher. May import: torch, errors."""

from __future__ import annotations

import os

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from quaver.errors import ConfigError


def launched_world_size() -> int:
    """Ranks that torchrun started, 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def init_world(device_type: str = "cpu") -> None:
    """Starts the default process group once; with one process a gloo group over an in-memory store."""
    if dist.is_initialized():
        return
    if launched_world_size() > 1:
        raise ConfigError(
            "not supported: training on more than one rank is not part of this release",
            where=f"WORLD_SIZE={launched_world_size()}",
            remedy="start one process",
        )
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


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
            remedy=f"start a multiple of {size} ranks, or set dp_shard_size to null or a divisor of {world}",
        )
    return size
