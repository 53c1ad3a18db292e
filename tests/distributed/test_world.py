"""Ranks and meshes: one process needs no launcher, and a shard group must divide the ranks."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from quaver.distributed import check_shard_size, init_world, launched_world_size, shard_mesh, world_size
from quaver.errors import ConfigError


def test_one_process_is_a_gloo_group_of_one(mesh):
    assert (dist.get_backend(), dist.get_world_size(), dist.get_rank()) == ("gloo", 1, 0)
    init_world()  # a second time is harmless
    assert mesh.size() == 1
    assert mesh.mesh_dim_names == ("shard",)
    assert shard_mesh(1).size() == 1


@pytest.mark.parametrize(("size", "world", "wanted"), [(None, 8, 8), (4, 8, 4), (8, 8, 8), (1, 3, 1)])
def test_legal_shard_groups(size, world, wanted):
    assert check_shard_size(size, world) == wanted


@pytest.mark.parametrize(("size", "world"), [(3, 8), (16, 8), (2, 1)])
def test_illegal_shard_groups_name_both_numbers(size, world):
    with pytest.raises(
        ConfigError, match=rf"(?s)dp_shard_size {size} .*ranks {world}.*fsdp_config\.dp_shard_size"
    ):
        check_shard_size(size, world)


def test_the_launcher_is_heard_until_there_is_a_group(mesh, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert launched_world_size() == 2
    assert world_size() == mesh.size() == 1  # the group that exists, not what a launcher said
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    assert world_size() == 2


def test_who_starts_a_group_is_told(mesh):
    assert init_world() is False
