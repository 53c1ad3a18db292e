"""A folder into a model that two ranks share: each keeps its own rows, even where they are not equally many."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from quaver.assembly import quantize_modules
from quaver.checkpoint.hf_import import HFSource
from quaver.checkpoint.hf_load import load_into
from quaver.config import LowPrecisionConfig, ReplacementRule
from quaver.low_precision import quantised_weights, refresh


def _model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(32, 64, bias=False), nn.Linear(64, 5))


def _quantised(net: nn.Module, fmt: str) -> nn.Module:
    settings = {"mxfp8": ("mxfp8_e4m3", "mx_block"), "hif8": ("hif8", "current")}[fmt]
    config = LowPrecisionConfig(enabled=True, format=settings[0], scaling=settings[1])
    quantize_modules(net, config, plan=ReplacementRule("0", nn.Linear, "low_precision_linear"))
    return net


def _rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    for fmt in ("mxfp8", "hif8"):
        net, expected = _quantised(_model(1), fmt), _quantised(_model(0), fmt)
        for made in (net, expected):
            fully_shard(made, mesh=mesh)
        refresh(expected)
        load_into(net, HFSource(folder))
        whole = {fqn: tensor.full_tensor() for fqn, tensor in net.state_dict().items()}
        want = _model(0).state_dict()
        assert whole.keys() == want.keys()
        assert all(torch.equal(whole[fqn], tensor) for fqn, tensor in want.items())
        assert net[1].weight.to_local().shape[0] == (3, 2)[rank]
        codes = quantised_weights(net)["0.weight"][1].physical
        expected_codes = quantised_weights(expected)["0.weight"][1].physical
        assert codes.keys() == expected_codes.keys()
        assert all(torch.equal(codes[name], code) for name, code in expected_codes.items())
    Path(folder, f"done-{rank}").touch()
    dist.destroy_process_group()


def test_each_rank_takes_its_own_rows(tmp_path: Path) -> None:
    save_file(_model(0).state_dict(), tmp_path / "model.safetensors")
    torch.multiprocessing.spawn(_rank, args=(str(tmp_path),), nprocs=2)
    assert (tmp_path / "done-0").exists()
    assert (tmp_path / "done-1").exists()
