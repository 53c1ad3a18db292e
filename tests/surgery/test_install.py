"""Building and installing replacements: equivalence is checked, and a failure leaves the model as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from quaver.errors import PlanError
from quaver.surgery import BoundRule, build_replacements, compile_plan, install


class Swapped(nn.Linear):
    """The least that a replacement is: the same parameters under another class."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 2


def take(source: nn.Module, fqn: str) -> nn.Module:
    """A faithful factory: shares every registered member, copies the flag."""
    new = Swapped.__new__(Swapped)
    nn.Module.__init__(new)
    new.in_features, new.out_features = source.in_features, source.out_features
    for name, parameter in source._parameters.items():
        new.register_parameter(name, parameter)
    for name, buffer in source._buffers.items():
        new.register_buffer(name, buffer, persistent=name not in source._non_persistent_buffers_set)
    return new.train(source.training)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)
        self.c = nn.Linear(4, 4)
        self.a.register_buffer("scale", torch.ones(1))
        self.a.register_buffer("hidden", torch.ones(1), persistent=False)
        self.also_a = self.a
        self.c.weight = self.b.weight
        self.b.bias.requires_grad_(False)
        self.b.eval()


def plan_for(model: nn.Module, factory: Callable[[nn.Module, str], Any], *patterns: str) -> Any:
    return compile_plan(model, [BoundRule(patterns or ("a", "b", "c"), nn.Linear, True, factory, "take")])


def fingerprint(model: nn.Module) -> list[Any]:
    """Everything a failed attempt must leave alone, down to object identity."""
    return [
        [(n, id(m), m.training) for n, m in model.named_modules(remove_duplicate=False)],
        [(n, id(p), p.requires_grad) for n, p in model.named_parameters(remove_duplicate=False)],
        [(n, id(b)) for n, b in model.named_buffers(remove_duplicate=False)],
        list(model.state_dict()),
    ]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_faithful_replacement_is_installed_everywhere(device: str) -> None:
    with torch.device(device):
        model = Model()
    before = fingerprint(model)
    built = build_replacements(model, plan_for(model, take))
    assert fingerprint(model) == before  # built and checked, not installed
    install(model, built)
    after = fingerprint(model)
    assert type(model.a) is type(model.b) is type(model.c) is Swapped
    assert model.also_a is model.a
    assert model.c.weight is model.b.weight
    assert [(n, t) for n, _, t in after[0]] == [(n, t) for n, _, t in before[0]]
    assert after[1:] == before[1:]
    if device == "cpu":
        assert torch.equal(
            model.a(torch.eye(4)), 2 * nn.functional.linear(torch.eye(4), model.a.weight, model.a.bias)
        )


def test_an_alias_alone_in_the_pattern_replaces_both_places() -> None:
    model = Model()
    install(model, build_replacements(model, plan_for(model, take, "also_a")))
    assert type(model.a) is Swapped
    assert model.also_a is model.a


def _broken(change: Callable[[nn.Module, nn.Module], Any]) -> Callable[[nn.Module, str], Any]:
    def factory(source: nn.Module, fqn: str) -> Any:
        new = take(source, fqn)
        if fqn != "c":  # the first two succeed: nothing of them may remain
            return new
        changed = change(source, new)
        return new if changed is None else changed

    return factory


class OtherSignature(Swapped):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs)


class ExtraArgument(Swapped):
    def forward(self, input: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return super().forward(input)


def _as(kind: type) -> Callable[[nn.Module, nn.Module], None]:
    return lambda source, new: setattr(new, "__class__", kind)


def _set(name: str, value: Callable[[nn.Module], Any]) -> Callable[[nn.Module, nn.Module], None]:
    return lambda source, new: setattr(new, name, value(source))


BREAKAGES: dict[str, tuple[Callable[[nn.Module, nn.Module], Any], str]] = {
    "copied parameter": (_set("weight", lambda s: nn.Parameter(s.weight.detach().clone())), "new object"),
    "shape": (_set("weight", lambda s: nn.Parameter(torch.zeros(2, 4))), "shape of parameter weight"),
    "dtype": (
        _set("weight", lambda s: nn.Parameter(s.weight.detach().double())),
        "dtype of parameter weight",
    ),
    "frozen copy": (
        _set("weight", lambda s: nn.Parameter(s.weight.detach(), False)),
        "requires_grad of parameter",
    ),
    "dropped parameter": (_set("bias", lambda s: None), "missing ['bias']"),
    "added parameter": (_set("gain", lambda s: nn.Parameter(torch.ones(1))), "added ['gain']"),
    "added buffer": (lambda s, n: n.register_buffer("amax", torch.ones(1)), "added ['amax']"),
    "submodule": (_set("quantizer", lambda s: nn.Identity()), "submodules"),
    "training flag": (lambda s, n: n.train(not s.training) and None, "training flag"),
    "the source itself": (lambda s, n: s, "the source itself"),
    "no module": (lambda s, n: "linear", "not a module"),
    "argument name": (_as(OtherSignature), "(inputs)"),
    "extra argument": (_as(ExtraArgument), "(input, scale)"),
    "froze the source": (lambda s, n: setattr(s.weight, "requires_grad", False), "requires_grad of"),
    "emptied the source": (lambda s, n: delattr(s, "weight"), "changed _parameters"),
    "switched the source": (lambda s, n: s.eval() and None, "training flag"),
    "hooked the source": (lambda s, n: s.register_forward_hook(print) and None, "changed _forward_hooks"),
}


@pytest.mark.parametrize("name", BREAKAGES)
def test_an_unfaithful_replacement_is_refused_and_nothing_changes(name: str) -> None:
    change, message = BREAKAGES[name]
    model = Model()
    before, hooks = fingerprint(model), len(model.c._forward_hooks)
    with pytest.raises(PlanError) as caught:
        build_replacements(model, plan_for(model, _broken(change)))
    assert message in str(caught.value)
    assert "c, factory take" in str(caught.value)
    assert fingerprint(model) == before
    assert len(model.c._forward_hooks) == hooks


def test_buffers_keep_their_identity_and_persistence() -> None:
    def recreate(source: nn.Module, fqn: str) -> nn.Module:
        new = take(source, fqn)
        new.register_buffer("scale", source.scale.clone())
        return new

    def persist(source: nn.Module, fqn: str) -> nn.Module:
        new = take(source, fqn)
        new.register_buffer("hidden", source.hidden, persistent=True)
        return new

    model = Model()
    with pytest.raises(PlanError, match="buffer scale is a new object"):
        build_replacements(model, plan_for(model, recreate, "a"))
    with pytest.raises(PlanError, match="state-dict keys"):
        build_replacements(model, plan_for(model, persist, "a"))


def test_a_factory_that_raises_leaves_the_model_and_names_the_module() -> None:
    def explode(source: nn.Module, new: nn.Module) -> None:
        del source.weight
        raise RuntimeError("no such kernel")

    model = Model()
    before = fingerprint(model)
    with pytest.raises(PlanError, match="RuntimeError: no such kernel") as caught:
        build_replacements(model, plan_for(model, _broken(explode)))
    assert caught.value.where == "c"
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert fingerprint(model) == before


@pytest.mark.parametrize(
    "register",
    [
        lambda m: m.register_forward_hook(lambda *a: None),
        lambda m: m.register_forward_pre_hook(lambda *a: None),
        lambda m: m.register_full_backward_hook(lambda *a: None),
        lambda m: m.register_full_backward_pre_hook(lambda *a: None),
        lambda m: m.register_state_dict_post_hook(lambda *a: None),
        lambda m: m.register_load_state_dict_pre_hook(lambda *a: None),
    ],
)
def test_hooks_that_would_be_lost_are_an_error(register: Callable[[nn.Module], Any]) -> None:
    model = Model()
    register(model.b)
    with pytest.raises(PlanError, match="would be lost"):
        build_replacements(model, plan_for(model, take))


def test_hooks_that_are_carried_over_are_fine() -> None:
    def carry(source: nn.Module, fqn: str) -> nn.Module:
        new = take(source, fqn)
        new._forward_hooks = source._forward_hooks
        return new

    model = Model()
    model.b.register_forward_hook(lambda *a: None)
    build_replacements(model, plan_for(model, carry))


def test_a_model_changed_after_the_plan_is_refused() -> None:
    model = Model()
    plan = plan_for(model, take)
    model.b = Swapped(4, 4)
    with pytest.raises(PlanError, match="not the one that the plan was compiled from") as caught:
        build_replacements(model, plan)
    assert caught.value.where == "b"


@pytest.mark.parametrize("place", ["a", "also_a", "c"])
def test_a_model_changed_after_the_build_gets_no_replacement_at_all(place: str) -> None:
    model = Model()
    built = build_replacements(model, plan_for(model, take))
    setattr(model, place, nn.Linear(4, 4))
    before = fingerprint(model)
    with pytest.raises(PlanError):
        install(model, built)
    assert fingerprint(model) == before


def test_a_parameter_swapped_after_the_build_rolls_everything_back() -> None:
    model = Model()
    built = build_replacements(model, plan_for(model, take))
    model.b.weight = nn.Parameter(torch.zeros(4, 4))  # the replacement still holds the old one
    before = fingerprint(model)
    with pytest.raises(PlanError, match="would change"):
        install(model, built)
    assert fingerprint(model) == before


def test_a_failure_in_the_middle_of_the_installation_rolls_back() -> None:
    class Fragile(dict):  # type: ignore[type-arg]
        """Refuses the third assignment, after two replacements stand."""

        def __setitem__(self, key: str, value: nn.Module) -> None:
            if key == "b" and isinstance(value, Swapped):
                raise MemoryError("out of room")
            super().__setitem__(key, value)

    model = Model()
    built = build_replacements(model, plan_for(model, take))
    model._modules = Fragile(model._modules)
    before = fingerprint(model)
    with pytest.raises(MemoryError):
        install(model, built)
    assert fingerprint(model) == before
    assert type(model.a) is nn.Linear
