"""What makes a replacement equivalent to its source: everything but how it computes.

Names, shapes, dtypes, aliasing, `requires_grad`, the training flag, state-dict keys, hooks and the forward
signature stay, and the parameters and buffers are the *same objects*. A source is also held against its own
snapshot after its factory ran, and put back where the factory damaged it. Imports torch and the plan.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from quaver.surgery.plan import type_name

_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


class Snapshot:
    """What a factory must not touch in its source: registered members, flags, hooks."""

    def __init__(self, source: nn.Module) -> None:
        self.modules = [
            (name, module, {key: value.copy() for key, value in self._members(module)}, module.training)
            for name, module in source.named_modules(remove_duplicate=False)
        ]
        self.parameters = [(name, p, p.requires_grad) for name, p in source.named_parameters()]

    @staticmethod
    def _members(module: nn.Module) -> Iterator[tuple[str, Any]]:
        for key in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", *_HOOKS):
            yield key, getattr(module, key)

    def damage(self) -> str | None:
        """The first thing in the source that is not as it was, or None."""
        for name, module, members, training in self.modules:
            for key, value in self._members(module):
                if not _same(value, members[key]):
                    return f"the factory changed {key} of its source {name or '(itself)'}"
            if module.training != training:
                return f"the factory changed the training flag of its source {name or '(itself)'}"
        for name, parameter, requires_grad in self.parameters:
            if parameter.requires_grad != requires_grad:
                return f"the factory changed requires_grad of {name}"
        return None

    def restore(self) -> None:
        """Put the source back as it was."""
        for _, module, members, training in self.modules:
            for key, value in self._members(module):
                value.clear()
                value.update(members[key])
            module.training = training
        for _, parameter, requires_grad in self.parameters:
            parameter.requires_grad_(requires_grad)


def _same(value: Any, other: Any) -> bool:
    """Equality of dicts of objects by identity and order, of sets by value."""
    if isinstance(value, dict):
        return [(k, id(v)) for k, v in value.items()] == [(k, id(v)) for k, v in other.items()]
    return bool(value == other)


def difference(source: nn.Module, built: object) -> str | None:
    """The first way in which a replacement is not what its source is, or None."""
    if not isinstance(built, nn.Module):
        return f"it is a {type_name(type(built))}, not a module"
    if built is source:
        return "it is the source itself"
    old_names = [name for name, _ in source.named_modules(remove_duplicate=False)]
    new_names = [name for name, _ in built.named_modules(remove_duplicate=False)]
    if old_names != new_names:
        return f"submodules {_first_difference(old_names, new_names)}"
    problem = _tensor_difference(
        "parameter",
        dict(source.named_parameters(remove_duplicate=False)),
        dict(built.named_parameters(remove_duplicate=False)),
    ) or _tensor_difference(
        "buffer",
        dict(source.named_buffers(remove_duplicate=False)),
        dict(built.named_buffers(remove_duplicate=False)),
    )
    if problem:
        return problem
    old_keys, new_keys = list(source.state_dict(keep_vars=True)), list(built.state_dict(keep_vars=True))
    if old_keys != new_keys:
        return f"state-dict keys {_first_difference(old_keys, new_keys)}"
    for (name, old_module), (_, new_module) in zip(source.named_modules(), built.named_modules()):
        if old_module.training != new_module.training:
            return f"the training flag of {name or 'the module'} is {new_module.training}"
    return _signature_difference(source, built) or _lost_hooks(source, built)


def _tensor_difference(what: str, old: dict[str, torch.Tensor], new: dict[str, torch.Tensor]) -> str | None:
    if list(old) != list(new):
        return f"{what}s {_first_difference(list(old), list(new))}"
    for name, tensor in old.items():
        other = new[name]
        for field in ("shape", "dtype", "device", "requires_grad"):
            want, got = getattr(tensor, field), getattr(other, field)
            if want != got:
                return f"{field} of {what} {name} is {got}, was {want}"
        if other is not tensor:
            return f"{what} {name} is a new object; aliasing and the optimiser would lose the old one"
    return None


def _first_difference(old: list[str], new: list[str]) -> str:
    missing = [name for name in old if name not in new]
    added = [name for name in new if name not in old]
    if missing or added:
        return f"differ: missing {missing or 'none'}, added {added or 'none'}"
    return f"stand in another order or number: {new}, were {old}"


def _signature_difference(source: nn.Module, built: nn.Module) -> str | None:
    """Compare the forwards' parameters by name, kind and default (annotations may be written differently)."""
    old, new = (
        [(p.name, p.kind, p.default) for p in inspect.signature(module.forward).parameters.values()]
        for module in (source, built)
    )
    if old == new:
        return None
    shown = [f"({', '.join(name for name, _, _ in parameters)})" for parameters in (new, old)]
    return f"its forward takes {shown[0]}, the source's {shown[1]} (names, kinds and defaults must agree)"


def _lost_hooks(source: nn.Module, built: nn.Module) -> str | None:
    for (name, old_module), (_, new_module) in zip(source.named_modules(), built.named_modules()):
        for kind in _HOOKS:
            kept = {id(hook) for hook in getattr(new_module, kind).values()}
            for hook in getattr(old_module, kind).values():
                if id(hook) not in kept:
                    return (
                        f"a hook in {kind} of {name or 'the source'} would be lost "
                        f"({getattr(hook, '__qualname__', hook)}): register hooks after the replacement"
                    )
    return None
