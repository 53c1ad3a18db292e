"""Which modules are FSDP units of their own, in which dtype each computes, and when each gives its weights back."""

from __future__ import annotations

import pytest
import torch
from test_equalities import batches, build
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from quaver.training import token_nats

LAYERS = [f"model.layers.{i}" for i in range(3)]
GATES = ["model.layers.1.mlp.gate", "model.layers.2.mlp.gate"]


def watched(model, fqn: str, parameter: str, seen: dict) -> None:
    """Notes what a unit's parameter is just before, in and just after the unit's forward."""
    unit = model.get_submodule(fqn)

    def note(moment: str):
        def hook(*_) -> None:
            weight = model.get_submodule(f"{fqn}.{parameter}".strip(".").rpartition(".")[0]).weight
            seen.setdefault((fqn, moment), []).append((isinstance(weight, DTensor), weight.dtype))

        return hook

    unit.register_forward_pre_hook(note("before"), prepend=True)  # ahead of FSDP's own
    unit.register_forward_pre_hook(note("in"))
    unit.register_forward_hook(note("after"))


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("fmt", ["bf16", "mxfp8"])
def test_routers_compute_in_fp32_in_units_of_their_own(micro, fmt: str, reshard: bool) -> None:
    config = micro(fmt, f"fsdp_config.reshard_after_forward={str(reshard).lower()}")
    assembly = build(config)
    model, seen = assembly.model, {}
    assert {n for n, m in model.named_modules() if isinstance(m, FSDPModule)} == {"", *LAYERS, *GATES}
    watched(model, "", "model.embed_tokens.weight", seen)
    for fqn in LAYERS:
        watched(model, fqn, "input_layernorm.weight", seen)
    for fqn in GATES:
        watched(model, fqn, "weight", seen)
    inside_layer = []
    model.get_submodule(LAYERS[1]).register_forward_pre_hook(
        lambda *_: inside_layer.append(isinstance(model.get_submodule(GATES[0]).weight, DTensor))
    )
    token_nats(model, batches(config, 1)[0]).backward()
    sharded = (True, torch.float32)
    for fqn in ("", *LAYERS, *GATES):
        computed = (False, torch.float32 if fqn in GATES else torch.bfloat16)
        assert seen[fqn, "before"] == [sharded], fqn
        assert seen[fqn, "in"] == [computed], fqn
        assert seen[fqn, "after"] == [sharded if reshard else computed], fqn
    assert inside_layer == [True], "the layer's unit has gathered the router's weight"
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor), name
        assert parameter.grad.dtype is torch.float32, name
