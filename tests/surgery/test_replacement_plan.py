"""Compiling a replacement plan: what it hits, and every way in which it refuses."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from quaver.errors import PlanError
from quaver.surgery import BoundRule, compile_plan


class Swapped(nn.Linear):
    @classmethod
    def take(cls, source: nn.Module, fqn: str) -> nn.Module:
        raise AssertionError("compiling a plan builds nothing")


class CustomLinear(nn.Linear):
    pass


class Wrapper(nn.Module):
    """An adapter in PEFT's manner."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base_layer = base


class LookAlike(nn.Module):
    """Computes like a Linear and holds none."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8, 8))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(8, 8, bias=False)
        self.o_proj = nn.Linear(8, 8, bias=False)


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up_proj = nn.Linear(8, 16, bias=False)
        self.down_proj = nn.Linear(16, 8, bias=False)
        self.act = nn.SiLU()


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn = Attention()
        self.mlp = MLP()


class Model(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 8)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.head = nn.Linear(8, 32, bias=False)


def rule(
    *patterns: str, exact: bool = True, name: str = "swap", low: bool = True, kind: type = nn.Linear
) -> BoundRule:
    return BoundRule(patterns, kind, exact, Swapped.take, name, low)


@pytest.fixture
def model() -> Model:
    with torch.device("meta"):
        return Model()


def refused(model: nn.Module, *rules: BoundRule) -> str:
    """Compile, expect a refusal, and hold the model to be untouched."""
    before = [(name, id(module)) for name, module in model.named_modules()]
    with pytest.raises(PlanError) as caught:
        compile_plan(model, rules)
    assert [(name, id(module)) for name, module in model.named_modules()] == before
    return str(caught.value)


def test_hits_by_pattern_and_targets_in_model_order(model: Model) -> None:
    plan = compile_plan(
        model, [rule("layers.*.mlp.*_proj"), rule("layers.{0,2}.self_attn.q_proj", name="other")]
    )
    mlp = [f"layers.{i}.mlp.{p}_proj" for i in range(3) for p in ("up", "down")]
    attention = ["layers.0.self_attn.q_proj", "layers.2.self_attn.q_proj"]
    assert plan.as_json() == [
        {"pattern": "layers.*.mlp.*_proj", "hits": mlp},
        {"pattern": "layers.{0,2}.self_attn.q_proj", "hits": attention},
    ]
    assert [t.fqn for t in plan.targets] == [
        *("layers.0.self_attn.q_proj", *mlp[0:2], *mlp[2:4], "layers.2.self_attn.q_proj", *mlp[4:6]),
    ]
    assert {t.fqn: (t.rule_index, t.factory_name) for t in plan.targets}[attention[1]] == (1, "other")
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.targets = ()  # type: ignore[misc]


def test_no_rules_is_an_empty_plan(model: Model) -> None:
    plan = compile_plan(model, [])
    assert plan.targets == plan.replacements == ()


def test_an_alias_is_one_target_with_all_its_names(model: Model) -> None:
    model.layers[2].mlp = model.layers[0].mlp
    plan = compile_plan(model, [rule("layers.2.mlp.up_proj")])
    (target,) = plan.targets
    assert target.fqn == "layers.0.mlp.up_proj"
    assert target.aliases == ("layers.0.mlp.up_proj", "layers.2.mlp.up_proj")
    assert plan.replacements[0].hits == ("layers.2.mlp.up_proj",)


def test_every_pattern_of_a_rule_must_hit(model: Model) -> None:
    text = refused(model, rule("head", "layers.*.mlp.upp_proj"))
    assert "layers.*.mlp.upp_proj" in text
    assert "did you mean layers.{*}.mlp.up_proj" in text


def test_a_rule_without_patterns_is_refused(model: Model) -> None:
    assert "no pattern" in refused(model, rule())


def test_hits_of_another_type_only_are_named(model: Model) -> None:
    text = refused(model, rule("layers.{*}", low=False), rule("head"))
    assert "another type" in text or "not the rule's type" in text
    assert "Layer" in text
    assert "embed" in refused(model, rule("embed"))
    assert "torch.nn.modules.sparse.Embedding" in refused(model, rule("embed"))


def test_two_factories_for_one_module(model: Model) -> None:
    text = refused(model, rule("layers.0.mlp.up_proj", name="a"), rule("layers.*.mlp.up_proj", name="b"))
    assert "layers.0.mlp.up_proj is claimed by two factories: a" in text
    assert "b (pattern 'layers.*.mlp.up_proj')" in text


def test_two_factories_through_two_names_of_one_module(model: Model) -> None:
    model.layers[2].mlp = model.layers[0].mlp
    text = refused(model, rule("layers.0.mlp.up_proj", name="a"), rule("layers.2.mlp.up_proj", name="b"))
    assert "layers.0.mlp.up_proj" in text
    assert "layers.2.mlp.up_proj" in text


def test_one_factory_twice_is_one_target(model: Model) -> None:
    plan = compile_plan(model, [rule("layers.0.mlp.up_proj"), rule("layers.*.mlp.up_proj")])
    assert [t.rule_index for t in plan.targets] == [0, 1, 1]


@pytest.mark.parametrize(
    "pattern", ["layers.1.mlp.up_proj", "layers.*.mlp.*_proj", "layers.*.mlp.*", "layers.*.mlp.**"]
)
def test_exact_type_refuses_a_subclass_by_name(model: Model, pattern: str) -> None:
    model.layers[1].mlp.up_proj = CustomLinear(8, 16, device="meta")
    text = refused(model, rule(pattern))
    assert "layers.1.mlp.up_proj" in text
    assert "CustomLinear" in text


def test_exact_type_false_takes_a_subclass(model: Model) -> None:
    model.layers[1].mlp.up_proj = CustomLinear(8, 16, device="meta")
    plan = compile_plan(model, [rule("layers.*.mlp.up_proj", exact=False)])
    assert len(plan.targets) == 3


@pytest.mark.parametrize(
    "pattern", ["layers.*.mlp.up_proj", "layers.*.mlp.*_proj", "layers.*.mlp.*", "layers.*.mlp.**"]
)
def test_exact_type_refuses_an_adapter(model: Model, pattern: str) -> None:
    model.layers[1].mlp.up_proj = Wrapper(model.layers[1].mlp.up_proj)
    text = refused(model, rule(pattern))
    assert "layers.1.mlp.up_proj" in text
    assert "Wrapper" in text


@pytest.mark.parametrize("pattern", ["layers.*.mlp.up_proj", "layers.*.mlp.*_proj"])
def test_a_look_alike_under_a_name_is_refused(model: Model, pattern: str) -> None:
    model.layers[1].mlp.up_proj = LookAlike()
    assert "LookAlike" in refused(model, rule(pattern))


def test_a_parametrised_linear_is_not_the_exact_type(model: Model) -> None:
    nn.utils.parametrizations.orthogonal(model.layers[0].mlp.to_empty(device="cpu").up_proj)
    assert "ParametrizedLinear" in refused(model, rule("layers.*.mlp.up_proj"))


def test_a_bare_wildcard_selects_by_type(model: Model) -> None:
    plan = compile_plan(model, [rule("layers.0.mlp.*")])
    assert plan.replacements[0].hits == ("layers.0.mlp.up_proj", "layers.0.mlp.down_proj")


@pytest.mark.parametrize(
    "pattern",
    [
        *("**.self_attn.*_proj", "layers.*.self_attn.*", "layers.0.self_attn.**", "layers.*.self_attn.{*}"),
        *(
            "**.*_proj",
            "*_proj",
            "**.**.*_proj",
            "**.*proj",
            "**",
            "layers.**",
            "layers.*.*.*_proj",
            "layers.0.*.*",
        ),
    ],
)
def test_patterns_that_reach_attention_by_a_wildcard_are_too_wide(model: Model, pattern: str) -> None:
    text = refused(model, rule(pattern))
    assert repr(pattern) in text
    assert "wildcard" in text or "whole model" in text


def test_the_width_rule_is_for_low_precision_alone(model: Model) -> None:
    plan = compile_plan(model, [rule("**.self_attn.*_proj", low=False)])
    assert len(plan.targets) == 6


def test_a_whole_model_pattern_is_refused_without_attention_too() -> None:
    assert "whole model" in refused(MLP(), rule("**.*_proj"))


def test_a_malformed_pattern_is_named(model: Model) -> None:
    assert "'layers.{3-1}.mlp'" in refused(model, rule("layers.{3-1}.mlp"))


def test_a_target_inside_a_target(model: Model) -> None:
    text = refused(model, rule("layers.*.mlp", kind=MLP, name="outer"), rule("layers.1.mlp.up_proj"))
    assert "layers.1.mlp.up_proj" in text
    assert "inside layers.1.mlp" in text


def test_a_weight_tied_to_an_unplanned_module(model: Model) -> None:
    model.head.weight = model.embed.weight
    text = refused(model, rule("head"))
    assert "embed.weight is shared with head" in text


def test_a_weight_tied_between_two_targets_is_fine(model: Model) -> None:
    model.layers[0].mlp.up_proj.weight = model.layers[1].mlp.up_proj.weight
    assert len(compile_plan(model, [rule("layers.*.mlp.up_proj")]).targets) == 3
