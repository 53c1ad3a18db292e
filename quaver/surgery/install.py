"""Builds every replacement and checks it, then installs all of them or none.

Factories are foreign code: whatever one does, a failure leaves the model exactly as it was.
Imports torch, the plan, the equivalence check and `quaver.errors`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from quaver.errors import PlanError
from quaver.surgery.equivalence import Snapshot, difference
from quaver.surgery.plan import ReplacementPlan, Target


@dataclass(frozen=True)
class Replacement:
    """A checked replacement: its target, the module that stands in the model, and the module that will."""

    target: Target
    source: nn.Module
    module: nn.Module


@dataclass(frozen=True)
class Replacements:
    """Every replacement of a plan, built and checked, not installed yet."""

    plan: ReplacementPlan
    entries: tuple[Replacement, ...]


def build_replacements(model: nn.Module, plan: ReplacementPlan) -> Replacements:
    """Build every replacement through its factory, on whatever device the model is, and check it.

    The model is left untouched, also when a factory fails.

    Raises:
        PlanError: the model is not the one the plan was compiled from; a factory failed; a replacement
            differs from its source in a name, shape, dtype, identity, flag, state-dict key or in its forward
            signature, or would lose hooks registered on the source.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    entries = []
    for target in plan.targets:
        rule = plan.rules[target.rule_index]
        source = modules.get(target.fqn)
        if source is None or any(modules.get(alias) is not source for alias in target.aliases):
            raise _changed(target.fqn)
        if not rule.accepts(source):
            raise _changed(target.fqn)
        snapshot = Snapshot(source)
        try:
            built = rule.factory(source, target.fqn)
            problem = snapshot.damage() or difference(source, built)
        except PlanError:
            snapshot.restore()
            raise
        except Exception as error:
            snapshot.restore()
            raise PlanError(
                f"the factory {target.factory_name} failed: {type(error).__name__}: {error}", where=target.fqn
            ) from error
        if problem is not None:
            snapshot.restore()
            raise PlanError(
                f"the replacement is not equivalent to its source: {problem}",
                where=f"{target.fqn}, factory {target.factory_name}",
                remedy="a factory reuses its source's parameters and buffers, names and forward signature",
            )
        entries.append(Replacement(target, source, built))
    return Replacements(plan, tuple(entries))


def install(model: nn.Module, replacements: Replacements) -> None:
    """Put every replacement in its places (all aliases of a module get the one new module), or none.

    Raises:
        PlanError: a place no longer holds the module that was replaced, or the model's names, parameters or
            buffers would change; the model is then exactly as it was.
    """
    places: list[tuple[nn.Module, str, Replacement]] = []
    for entry in replacements.entries:
        for alias in entry.target.aliases:
            parent_fqn, _, leaf = alias.rpartition(".")
            try:
                parent = model.get_submodule(parent_fqn)
            except AttributeError as error:
                raise _changed(alias) from error
            if parent._modules.get(leaf) is not entry.source:
                raise _changed(alias)
            places.append((parent, leaf, entry))
    before = _identity(model)
    done: list[tuple[nn.Module, str, nn.Module]] = []
    try:
        for parent, leaf, entry in places:
            done.append((parent, leaf, entry.source))
            parent._modules[leaf] = entry.module
        if _identity(model) != before:
            raise PlanError(
                "the names, parameters or buffers of the model would change",
                where=", ".join(entry.target.fqn for entry in replacements.entries[:3]),
                remedy="build the replacements again from the model as it is",
            )
    except BaseException:
        for parent, leaf, source in done:
            dict.__setitem__(parent._modules, leaf, source)
        raise


def _identity(model: nn.Module) -> list[list[Any]]:
    """What an installation leaves as it is: module names, names and objects of parameters and buffers."""
    return [
        [fqn for fqn, _ in model.named_modules(remove_duplicate=False)],
        [(fqn, id(p), p.requires_grad) for fqn, p in model.named_parameters(remove_duplicate=False)],
        [(fqn, id(b)) for fqn, b in model.named_buffers(remove_duplicate=False)],
        list(model.state_dict(keep_vars=True)),
    ]


def _changed(fqn: str) -> PlanError:
    return PlanError(
        "the model is not the one that the plan was compiled from",
        where=fqn,
        remedy="compile the plan, build the replacements and install them without a change in between",
    )
