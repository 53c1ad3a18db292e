"""Frozen model specifications: what a named model must be, field by field, whatever code builds it.

A source config could change a model without a word; the check compares config fields, layout, every
parameter's shape and the counts by category, and names the first one that differs. Expected shapes are
written out here from the specification's numbers, never read off a built model. Imports torch, the matcher,
the MoE iterator, errors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from quaver.errors import PlanError
from quaver.models.moe import iter_moe_layers
from quaver.surgery import match

# A parameter belongs to the first category one of whose patterns matches its FQN; `other` takes the rest.
# `mla` holds whatever projects in an attention module; norms come first, since some lie inside attention.
CATEGORY_RULES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("embedding", ("**.embed_tokens.*",)),
    ("lm_head", ("**.lm_head.*",)),
    ("norms", ("**.norm.*", "**.*_norm.*", "**.*layernorm.*")),
    ("mla", ("**.self_attn.**",)),
    ("shared_experts", ("**.shared_experts.**",)),
    ("routed_experts", ("**.experts.**",)),
    ("router", ("**.mlp.gate.*",)),
    ("dense_mlp", ("**.mlp.*_proj.*",)),
)
CATEGORIES = (
    *(
        "embedding",
        "lm_head",
        "mla",
        "dense_mlp",
        "shared_experts",
        "routed_experts",
        "router",
        "norms",
        "other",
    ),
)


@dataclass(frozen=True)
class ModelSpec:
    """A frozen specification.

    Attributes:
        name: what `model.spec` calls it.
        model_type: the transformers model type.
        config: fields of the config and their values.
        counts: parameters by category.
        total: all parameters.
    """

    name: str
    model_type: str
    config: dict[str, Any]
    counts: dict[str, int]
    total: int

    def layout(self) -> tuple[str, ...]:
        """`dense` or `moe` for each layer."""
        dense = self.config["first_k_dense_replace"]
        return tuple("dense" if i < dense else "moe" for i in range(self.config["num_hidden_layers"]))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every parameter's FQN and shape."""
        c = self.config
        hidden, heads, rank = c["hidden_size"], c["num_attention_heads"], c["kv_lora_rank"]
        nope, rope, value = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
        experts, inner = c["n_routed_experts"], c["moe_intermediate_size"]
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (c["vocab_size"], hidden)}
        for index, kind in enumerate(self.layout()):
            layer = f"model.layers.{index}"
            shapes[f"{layer}.self_attn.q_proj.weight"] = (heads * (nope + rope), hidden)
            shapes[f"{layer}.self_attn.kv_a_proj_with_mqa.weight"] = (rank + rope, hidden)
            shapes[f"{layer}.self_attn.kv_a_layernorm.weight"] = (rank,)
            shapes[f"{layer}.self_attn.kv_b_proj.weight"] = (heads * (nope + value), rank)
            shapes[f"{layer}.self_attn.o_proj.weight"] = (hidden, heads * value)
            if kind == "moe":
                shapes[f"{layer}.mlp.experts.gate_up_proj"] = (experts, 2 * inner, hidden)
                shapes[f"{layer}.mlp.experts.down_proj"] = (experts, hidden, inner)
                shapes[f"{layer}.mlp.gate.weight"] = (experts, hidden)
            mlp, width = f"{layer}.mlp", c["intermediate_size"]
            if kind == "moe":
                mlp, width = f"{layer}.mlp.shared_experts", c["n_shared_experts"] * inner
            shapes[f"{mlp}.gate_proj.weight"] = shapes[f"{mlp}.up_proj.weight"] = (width, hidden)
            shapes[f"{mlp}.down_proj.weight"] = (hidden, width)
            shapes[f"{layer}.input_layernorm.weight"] = (hidden,)
            shapes[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
        shapes["model.norm.weight"] = (hidden,)
        shapes["lm_head.weight"] = (c["vocab_size"], hidden)
        return shapes


DEEPSEEK_V3_16B = ModelSpec(
    name="deepseek_v3_16b",
    model_type="deepseek_v3",
    config={
        "vocab_size": 102400,
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 28,
        "first_k_dense_replace": 1,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "q_lora_rank": None,
        "kv_lora_rank": 3072,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "num_experts_per_tok": 6,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "max_position_embeddings": 4096,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
    },
    counts={
        "embedding": 209_715_200,
        "lm_head": 209_715_200,
        "mla": 678_952_960,
        "dense_mlp": 67_239_936,
        "shared_experts": 467_140_608,
        "routed_experts": 14_948_499_456,
        "router": 3_538_944,
        "norms": 202_752,
        "other": 0,
    },
    total=16_585_005_056,
)
SPECS = {spec.name: spec for spec in (DEEPSEEK_V3_16B,)}


def category(fqn: str) -> str:
    """The category of a parameter by its FQN."""
    for name, patterns in CATEGORY_RULES:
        if any(match(pattern, [fqn]) for pattern in patterns):
            return name
    return "other"


def parameter_table(model: nn.Module) -> dict[str, int]:
    """Parameters by category, in the order of `CATEGORIES`; a shared parameter counts once. Meta is fine."""
    table = dict.fromkeys(CATEGORIES, 0)
    for fqn, parameter in model.named_parameters():
        table[category(fqn)] += parameter.numel()
    return table


def check_spec(model: nn.Module, spec_name: str) -> None:
    """Compare a built model (meta is fine) with a frozen specification.

    Raises:
        PlanError: an unknown specification, or the first field that differs, with what it is and should be.
    """
    spec = SPECS.get(spec_name)
    if spec is None:
        raise PlanError(
            f"there is no specification {spec_name!r}",
            where="model.spec",
            remedy=f"one of {', '.join(SPECS)}",
        )
    config = getattr(model, "config", None)
    _same(spec, "model_type", getattr(config, "model_type", None), spec.model_type)
    for field, want in spec.config.items():
        _same(spec, field, getattr(config, field, None), want)
    moe = {fqn for fqn, _ in iter_moe_layers(model)}
    layers = [fqn for fqn, _ in model.named_modules() if match("model.layers.{*}", [fqn])]
    layout = tuple("moe" if f"{fqn}.mlp" in moe else "dense" for fqn in layers)
    for index, (got_kind, want_kind) in enumerate(zip(layout, spec.layout())):
        _same(spec, f"layout of layer {index}", got_kind, want_kind)
    _same(spec, "number of layers", len(layout), len(spec.layout()))
    for fqn, layer in iter_moe_layers(model):
        _same(spec, f"{fqn}.experts.num_experts", layer.get_submodule("experts").num_experts, 64)
    shapes = {fqn: tuple(parameter.shape) for fqn, parameter in model.named_parameters()}
    for fqn, want in spec.shapes().items():
        _same(spec, f"shape of {fqn}", shapes.get(fqn), want)
    extra = [fqn for fqn in shapes if fqn not in spec.shapes()]
    _same(spec, "parameters beyond the specification", extra[:3], [])
    table = parameter_table(model)
    for name in CATEGORIES:
        _same(spec, f"parameters in {name}", table[name], spec.counts[name])
    _same(spec, "total parameters", sum(table.values()), spec.total)


def _same(spec: ModelSpec, field: str, got: Any, want: Any) -> None:
    if got != want or type(got) is not type(want):
        raise PlanError(
            f"the model is not {spec.name}: {field} is {got!r}, the specification has {want!r}",
            where=f"model.spec: {spec.name}, {field}",
            remedy="correct model.config_overrides, or remove model.spec to build another model",
        )
