"""The micro DeepSeek-V3 of the training tests, as a model and as files written without the code under test."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from helpers.micro import MODEL, RULES  # noqa: F401
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

from quaver.models import from_hf_config, load_hf_config

EXPERTS, INNER, HIDDEN = MODEL["n_routed_experts"], MODEL["moe_intermediate_size"], MODEL["hidden_size"]
FUSED = "model.layers.1.mlp.experts.gate_up_proj"
GATE = "model.layers.1.mlp.experts.{}.gate_proj.weight"


def config(**overrides: Any):
    return load_hf_config("deepseek_v3", MODEL | overrides)


def model(seed: int = 0, dtype: str = "float32", **overrides: Any) -> PreTrainedModel:
    """Random weights, and router biases and norms that are not all 0 or 1."""
    torch.manual_seed(seed)
    made = from_hf_config("deepseek_v3", config_overrides=MODEL | overrides, torch_dtype=dtype)
    with torch.no_grad():
        for fqn, tensor in made.state_dict().items():
            if fqn.endswith(("e_score_correction_bias", "norm.weight")):
                tensor.add_(torch.randn_like(tensor) * 0.1)
    return made.eval()


def state(net: nn.Module) -> dict[str, torch.Tensor]:
    return {fqn: tensor.clone() for fqn, tensor in net.state_dict().items()}


def per_expert(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """DeepSeek's layout, written out from its description: gate is the first half, up the second."""
    out: dict[str, torch.Tensor] = {}
    for fqn, tensor in tensors.items():
        home, _, name = fqn.rpartition(".")
        if name == "gate_up_proj":
            for e, matrix in enumerate(tensor):
                gate, up = matrix.chunk(2)
                out[f"{home}.{e}.gate_proj.weight"] = gate.clone()
                out[f"{home}.{e}.up_proj.weight"] = up.clone()
        elif name == "down_proj" and tensor.dim() == 3:
            out |= {f"{home}.{e}.down_proj.weight": matrix.clone() for e, matrix in enumerate(tensor)}
        else:
            out[fqn] = tensor.clone()
    return out


def write(folder: Path, tensors: Mapping[str, torch.Tensor], hf_config: Any = None) -> Path:
    """A folder with one model.safetensors, and a config.json where one is given."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")
    if hf_config is not None:
        (folder / "config.json").write_text(hf_config.to_json_string())
    return folder


def write_shards(folder: Path, shards: Mapping[str, Mapping[str, torch.Tensor]]) -> Path:
    """A folder with several files and the index that belongs to them."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, tensors in shards.items():
        save_file(dict(tensors), folder / name)
    write_index(folder, {key: name for name, tensors in shards.items() for key in tensors})
    return folder


def write_index(folder: Path, weight_map: Mapping[str, Any]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict(weight_map)}))


def read(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder, by the library alone."""
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        loaded = load_file(file)
        assert not tensors.keys() & loaded.keys()
        tensors |= loaded
    return tensors


def assert_same(got: Mapping[str, torch.Tensor], want: Mapping[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    for fqn, tensor in want.items():
        assert got[fqn].dtype == tensor.dtype, fqn
        assert torch.equal(got[fqn], tensor), fqn
