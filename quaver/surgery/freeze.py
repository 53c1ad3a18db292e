"""Freezing by name: parameters that do not train, chosen with the same globs as everything else.

Buffers have no gradient; who updates them (a router's bias) looks at its module's parameters.
Imports torch, the matcher and `quaver.errors`.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from quaver.errors import PlanError
from quaver.surgery.pattern import did_you_mean, match


def freeze(model: nn.Module, patterns: Sequence[str]) -> dict[str, list[str]]:
    """Set `requires_grad = False` on the parameters that the patterns name; all or none. Works on meta.

    A pattern names parameters directly (`lm_head.weight`) or through a module that holds them at any depth
    (`model.layers.0`). A parameter with several FQNs is frozen under all of them.

    Returns:
        For each pattern the FQNs of the parameters that it froze, in the model's order.

    Raises:
        PlanError: a malformed pattern, or one that reaches no parameter.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    modules = [fqn for fqn, _ in model.named_modules(remove_duplicate=False)]
    hits: dict[str, list[str]] = {}
    for pattern in patterns:
        owners = set(match(pattern, modules))
        direct = set(match(pattern, parameters))
        hits[pattern] = [fqn for fqn in parameters if fqn in direct or not owners.isdisjoint(_ancestors(fqn))]
        if not hits[pattern]:
            raise PlanError(
                "a pattern freezes no parameter" + (f": {sorted(owners)[0]} holds none" if owners else ""),
                where=f"model.freeze, pattern {pattern!r}",
                remedy=did_you_mean(pattern, [*modules, *parameters]),
            )
    for names in hits.values():
        for fqn in names:
            parameters[fqn].requires_grad_(False)
    return hits


def _ancestors(fqn: str) -> list[str]:
    """The FQNs of the modules around a parameter, the root ("") included."""
    parts = fqn.split(".")[:-1]
    return [".".join(parts[:length]) for length in range(len(parts) + 1)]
