"""The replacement plan: which modules of a model are replaced, by which factory, and why that is unambiguous.

A plan is compiled from the module tree alone (names, types, identities), so it works on the meta device,
reads no data and changes nothing. Every doubt is an error here, before anything is built: a pattern that hits
nothing, a module that two factories claim, a module of another type where the rule names one, a pattern so
wide that it would reach attention projections nobody listed. Rules arrive with their factories bound; nothing
is looked up. Imports torch, the matcher and `quaver.errors`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from quaver.errors import PlanError
from quaver.surgery.pattern import components, did_you_mean, is_wildcard, match

Factory = Callable[[nn.Module, str], nn.Module]

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


@dataclass(frozen=True)
class BoundRule:
    """One rule, with its type and factory bound.

    Attributes:
        patterns: globs over module FQNs; each must hit at least one module of `module_type`.
        module_type: the class that is replaced.
        exact_type: True: `type(module) is module_type`, and a subclass or wrapper in its place is an error;
            False: subclasses are replaced too.
        factory: builds the replacement from (source module, its first FQN).
        factory_name: the factory's short name; two rules with one name count as the same factory.
        low_precision: whether the rule turns GEMMs to eight bits, which forbids patterns that are too wide.
    """

    patterns: tuple[str, ...]
    module_type: type[nn.Module]
    exact_type: bool
    factory: Factory
    factory_name: str
    low_precision: bool = True

    def accepts(self, module: nn.Module) -> bool:
        """Whether `module` is of the rule's type, exactly so under `exact_type`."""
        if self.exact_type:
            return type(module) is self.module_type
        return isinstance(module, self.module_type)


@dataclass(frozen=True)
class PatternHits:
    """A pattern and every FQN of the rule's type that it matched, aliases included, in module order."""

    pattern: str
    hits: tuple[str, ...]


@dataclass(frozen=True)
class Target:
    """One module to replace.

    Attributes:
        fqn: its first FQN in `named_modules` order.
        aliases: all its FQNs, `fqn` included: one module object may stand at several places.
        rule_index: the first rule that claims it.
        factory_name: the short name of that rule's factory.
    """

    fqn: str
    aliases: tuple[str, ...]
    rule_index: int
    factory_name: str


@dataclass(frozen=True)
class ReplacementPlan:
    """A frozen plan: the rules, what each pattern hit (in rule order), and the targets in module order."""

    rules: tuple[BoundRule, ...]
    replacements: tuple[PatternHits, ...]
    targets: tuple[Target, ...]

    def as_json(self) -> list[dict[str, Any]]:
        """The hit lists as `replacement.json` and `plan --json` hold them: [{"pattern", "hits": [fqn]}]."""
        return [{"pattern": entry.pattern, "hits": list(entry.hits)} for entry in self.replacements]


def compile_plan(model: nn.Module, rules: Sequence[BoundRule]) -> ReplacementPlan:
    """Decide which modules of `model` the rules replace, without touching the model (meta device is fine).

    Raises:
        PlanError: a malformed or too wide pattern; a pattern with no hit, or with hits of another type only;
            a module of another type where the rule names its type; one module claimed by two factories; a
            target inside another target; a low-precision target that shares a parameter with a module left as
            it is.
    """
    modules = {fqn: module for fqn, module in model.named_modules(remove_duplicate=False) if fqn}
    aliases: dict[int, list[str]] = {}
    for fqn, module in modules.items():
        aliases.setdefault(id(module), []).append(fqn)
    replacements: list[PatternHits] = []
    claims: dict[int, tuple[int, str]] = {}  # module identity -> (rule index, pattern)
    for index, rule in enumerate(rules):
        if not rule.patterns:
            raise PlanError("a replacement rule has no pattern", where=f"rule {index} ({rule.factory_name})")
        for pattern in rule.patterns:
            hits = _hits(pattern, rule, modules)
            replacements.append(PatternHits(pattern, tuple(hits)))
            for fqn in hits:
                first, first_pattern = claims.setdefault(id(modules[fqn]), (index, pattern))
                if rules[first].factory_name != rule.factory_name:
                    raise PlanError(
                        f"{fqn} is claimed by two factories: {rules[first].factory_name} (pattern "
                        f"{first_pattern!r}) and {rule.factory_name} (pattern {pattern!r})",
                        where=f"rules {first} and {index}; the module's FQNs: {aliases[id(modules[fqn])]}",
                        remedy="narrow one of the two patterns",
                    )
    targets = tuple(
        Target(names[0], tuple(names), claims[key][0], rules[claims[key][0]].factory_name)
        for key, names in aliases.items()
        if key in claims
    )
    _check_nesting(targets)
    _check_shared_parameters(model, modules, targets, rules)
    return ReplacementPlan(tuple(rules), tuple(replacements), targets)


def type_name(kind: type) -> str:
    """A class's full dotted name."""
    return f"{kind.__module__}.{kind.__qualname__}"


def _hits(pattern: str, rule: BoundRule, modules: dict[str, nn.Module]) -> list[str]:
    """The FQNs of the rule's type that `pattern` matches; every other outcome is an error."""
    where = f"pattern {pattern!r} for {rule.factory_name}, module type {type_name(rule.module_type)}"
    last = components(pattern)[-1]
    if rule.low_precision:
        _check_breadth(pattern, where)
    named = match(pattern, modules)
    if not named:
        same_type = [fqn for fqn, module in modules.items() if isinstance(module, rule.module_type)]
        raise PlanError("a pattern matches no module", where=where, remedy=did_you_mean(pattern, same_type))
    hits = []
    for fqn in named:
        if rule.accepts(modules[fqn]):
            _check_not_wrapped(fqn, rule, modules, where)
            hits.append(fqn)
        else:
            _check_other_type(fqn, rule, modules[fqn], last, where)
    if not hits:
        found = sorted({type_name(type(modules[fqn])) for fqn in named})
        raise PlanError(
            f"a pattern matches only modules of another type: {', '.join(found)}",
            where=f"{where}; first match {named[0]}",
            remedy="correct the pattern or the module type",
        )
    attention = [fqn for fqn in hits if "self_attn" in fqn.split(".")[:-1]]
    if rule.low_precision and is_wildcard(last) and attention:
        raise _too_wide(f"a pattern that ends in a wildcard reaches attention ({attention[0]})", where)
    return hits


def _check_breadth(pattern: str, where: str) -> None:
    """Refuse patterns that pick attention projections, or every projection of a model, by a wildcard."""
    *parents, last = components(pattern)
    if not is_wildcard(last):
        return
    if "self_attn" in parents:
        raise _too_wide("a pattern ends in a wildcard under self_attn", where)
    if last.endswith("proj") and all(component == "**" for component in parents):
        raise _too_wide("a pattern takes the projections of the whole model", where)


def _too_wide(what: str, where: str) -> PlanError:
    return PlanError(
        what,
        where=where,
        remedy="list the modules by name (`...self_attn.q_proj`, `...self_attn.o_proj`, `...mlp.*_proj`): "
        "which GEMMs run in eight bits is never a matter of luck",
    )


def _check_not_wrapped(fqn: str, rule: BoundRule, modules: dict[str, nn.Module], where: str) -> None:
    """A module called `base_layer` is the inside of an adapter (PEFT's convention) and stays as it is."""
    parent, _, leaf = fqn.rpartition(".")
    if rule.exact_type and leaf == "base_layer" and parent in modules:
        raise PlanError(
            f"{fqn} is the inside of a wrapper of type {type_name(type(modules[parent]))}",
            where=where,
            remedy="adapters and wrapped modules are not supported: plan the unwrapped model",
        )


def _check_other_type(fqn: str, rule: BoundRule, module: nn.Module, last: str, where: str) -> None:
    """Judge a matched module that is not of the rule's type: passed over, or an error that names its type.

    A last component with text in it (`q_proj`, `*_proj`) names modules, so each must be of the type. A bare
    wildcard selects by type, but not past a subclass or a wrapper of that type.
    """
    found = type_name(type(module))
    if rule.exact_type and isinstance(module, rule.module_type):
        what = f"{fqn} is a {found}, a subclass of the exact type"
    elif any(character.isalpha() for character in last):
        what = f"{fqn} is a {found}, not the rule's type"
    elif last != "**" and _wraps(module, rule.module_type):
        what = f"{fqn} is a {found}, which wraps the rule's type"
    else:
        return
    raise PlanError(what, where=where, remedy="narrow the pattern, or give that module a rule of its own")


def _wraps(module: nn.Module, module_type: type[nn.Module]) -> bool:
    children = dict(module.named_children())
    if isinstance(module, _CONTAINERS):
        return False
    return isinstance(children.get("base_layer"), module_type) or (
        len(children) == 1 and isinstance(next(iter(children.values())), module_type)
    )


def _check_nesting(targets: tuple[Target, ...]) -> None:
    """A target inside another one would be replaced in a module that is itself thrown away."""
    owner = {alias: target for target in targets for alias in target.aliases}
    for alias, target in owner.items():
        parts = alias.split(".")
        for length in range(1, len(parts)):
            outer = owner.get(".".join(parts[:length]))
            if outer is not None:
                raise PlanError(
                    f"{alias} ({target.factory_name}) lies inside {outer.fqn} ({outer.factory_name})",
                    where=f"rules {outer.rule_index} and {target.rule_index}",
                    remedy="replace one of the two, not both",
                )


def _check_shared_parameters(
    model: nn.Module, modules: dict[str, nn.Module], targets: tuple[Target, ...], rules: Sequence[BoundRule]
) -> None:
    """A parameter turned to eight bits must not also belong to a module that stays in full precision."""
    inside: dict[int, str] = {}
    planned = {alias for target in targets for alias in target.aliases}
    for target in targets:
        if rules[target.rule_index].low_precision:
            for parameter in modules[target.fqn].parameters():
                inside.setdefault(id(parameter), target.fqn)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        parts = name.split(".")
        covered = any(".".join(parts[:length]) in planned for length in range(1, len(parts)))
        if id(parameter) in inside and not covered:
            raise PlanError(
                f"{name} is shared with {inside[id(parameter)]}, which would turn to eight bits",
                where=f"{name} belongs to a module outside the plan",
                remedy="untie the two (for a language model: tie_word_embeddings: false), or leave both out",
            )
