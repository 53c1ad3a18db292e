"""Initialising block by block gives the bits of transformers' own initialisation of the whole model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import TINY, TINY_LLAMA
from torch import nn
from transformers import PreTrainedModel
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Experts

from quaver.errors import PlanError
from quaver.models import (
    build_on_meta,
    from_hf_config,
    init_units,
    load_hf_config,
    materialise,
    materialise_unit,
)
from quaver.surgery import BoundRule, build_replacements, compile_plan, freeze, install


def reference(kind: str, values: dict[str, Any], dtype: torch.dtype, seed: int) -> PreTrainedModel:
    """transformers' own full initialisation: seed, then `initialize_weights` on the whole model."""
    model = from_hf_config(kind, config_overrides=values, torch_dtype=dtype)
    for module in model.modules():
        module._is_hf_initialized = False
    torch.manual_seed(seed)
    model.initialize_weights()
    return model


def assert_same_values(got: nn.Module, want: nn.Module) -> None:
    for read in (nn.Module.named_parameters, nn.Module.named_buffers):
        got_tensors, want_tensors = dict(read(got)), dict(read(want))
        assert list(got_tensors) == list(want_tensors)
        for name, tensor in got_tensors.items():
            assert tensor.device.type == "cpu", name
            assert tensor.dtype == want_tensors[name].dtype, name
            assert torch.equal(tensor, want_tensors[name]), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("kind", "values"),
    [("deepseek_v3", TINY), ("deepseek_v3", {**TINY, "q_lora_rank": 32}), ("llama", TINY_LLAMA)],
)
def test_bit_equal_to_the_full_initialisation(kind: str, values: dict[str, Any], dtype: torch.dtype) -> None:
    want = reference(kind, values, dtype, seed=11)
    model = build_on_meta(load_hf_config(kind, values), dtype)
    done: list[str] = []

    def watch(fqn: str, module: nn.Module) -> None:
        """When a unit is done, all units after it are still on meta: one block at a time."""
        done.append(fqn)
        later = [unit for name, unit in init_units(model) if name not in done]
        assert all(p.is_meta for unit in later for p in unit.parameters())
        assert not any(p.is_meta for p in module.parameters())

    torch.manual_seed(11)
    materialise(model, "cpu", watch)
    assert_same_values(model, want)
    ids = torch.randint(0, 96, (2, 12))
    assert torch.equal(model(ids).logits, want(ids).logits)


def test_units_in_order_own_every_tensor_once() -> None:
    model = build_on_meta(load_hf_config("deepseek_v3", TINY))
    units = init_units(model)
    assert [fqn for fqn, _ in units] == [
        "model.embed_tokens",
        *(f"model.layers.{i}" for i in range(3)),
        *("model.norm", "model.rotary_emb", "lm_head"),
    ]
    owned = [id(t) for _, unit in units for t in (*unit.parameters(), *unit.buffers())]
    assert sorted(owned) == sorted(id(t) for t in (*model.parameters(), *model.buffers()))


def test_known_values_after_init() -> None:
    """Norms are ones, router biases FP32 zeros, rotary frequencies theta^(-2i/d), draws 0.02 wide."""
    model = build_on_meta(load_hf_config("deepseek_v3", TINY))
    torch.manual_seed(0)
    materialise(model, "cpu")
    assert torch.equal(model.model.norm.weight, torch.ones(64, dtype=torch.bfloat16))
    for index in (1, 2):
        bias = model.model.layers[index].mlp.gate.e_score_correction_bias
        assert torch.equal(bias, torch.zeros(4))
        assert bias.dtype == torch.float32
    want = 10000.0 ** (-torch.arange(0, 16, 2, dtype=torch.float64) / 16)
    torch.testing.assert_close(model.model.rotary_emb.inv_freq.double(), want, rtol=1e-6, atol=0)
    assert "model.rotary_emb.inv_freq" not in model.state_dict()
    assert 0.019 < model.model.layers[1].mlp.experts.gate_up_proj.float().std() < 0.021


class SwappedLinear(nn.Linear):
    pass


class SwappedExperts(DeepseekV3Experts):
    pass


class UnrelatedExperts(nn.Module):
    """Same names, but no subclass: transformers does not know how to initialise it."""

    forward = DeepseekV3Experts.forward


def swap_to(kind: type[nn.Module]) -> Any:
    def factory(source: nn.Module, fqn: str) -> nn.Module:
        new = kind.__new__(kind)
        new.__dict__ = dict(source.__dict__)  # shares parameters, buffers, submodules and settings
        return new

    return factory


LINEARS = ("model.layers.*.self_attn.q_proj", "model.layers.*.mlp.shared_experts.*_proj")
EXPERTS = "model.layers.*.mlp.experts"


def swapped(experts: type[nn.Module]) -> PreTrainedModel:
    model = build_on_meta(load_hf_config("deepseek_v3", TINY))
    rules = [
        BoundRule(LINEARS, nn.Linear, True, swap_to(SwappedLinear), "linear"),
        BoundRule((EXPERTS,), DeepseekV3Experts, True, swap_to(experts), "experts"),
    ]
    install(model, build_replacements(model, compile_plan(model, rules)))
    return model


def test_replacements_on_meta_are_initialised_like_their_sources() -> None:
    want = reference("deepseek_v3", TINY, torch.bfloat16, seed=7)
    model = swapped(SwappedExperts)
    torch.manual_seed(7)
    materialise(model, "cpu")
    assert type(model.model.layers[2].mlp.experts) is SwappedExperts
    assert type(model.model.layers[0].self_attn.q_proj) is SwappedLinear
    assert_same_values(model, want)


def test_a_tensor_that_nobody_initialises_is_found() -> None:
    model = swapped(UnrelatedExperts)
    with pytest.raises(
        PlanError, match="does not initialise gate_up_proj of a DeepseekV3DecoderLayer"
    ) as caught:
        materialise(model, "cpu")
    assert caught.value.where == "model.layers.1"


def test_flags_and_ties_inside_a_unit_survive() -> None:
    model = build_on_meta(load_hf_config("deepseek_v3", TINY))
    freeze(model, ["model.layers.0.mlp"])
    first = model.model.layers[1].mlp.shared_experts
    first.up_proj.weight = first.gate_proj.weight
    materialise(model, "cpu")
    assert first.up_proj.weight is first.gate_proj.weight
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    assert frozen == [f"model.layers.0.mlp.{n}_proj.weight" for n in ("gate", "up", "down")]


def test_a_unit_is_made_once() -> None:
    model = build_on_meta(load_hf_config("deepseek_v3", TINY))
    materialise_unit(model, model.model.norm, "cpu")
    with pytest.raises(PlanError, match="not on meta"):
        materialise_unit(model, model.model.norm, "cpu")


def test_tied_embeddings_cannot_be_built_by_blocks() -> None:
    model = build_on_meta(load_hf_config("llama", {**TINY_LLAMA, "tie_word_embeddings": True}))
    with pytest.raises(PlanError, match=r"model\.embed_tokens and lm_head share a parameter"):
        init_units(model)
