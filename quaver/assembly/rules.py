"""Binds the names of a config to objects: module types to classes, replacement names to factories.

A config holds strings; only this table turns them into code. Nothing is imported on a config's word. What needs
transformers is imported when a rule names it, so that a plain module needs torch alone.
May import: config, surgery, low_precision, models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from torch import nn

from quaver.config import ReplacementRule
from quaver.errors import PlanError
from quaver.low_precision import LowPrecisionModule, LowPrecisionPolicy, replace_low_precision_linear
from quaver.surgery import BoundRule

ReplacementFactory = Callable[..., LowPrecisionModule]


def _linear() -> type[nn.Module]:
    return nn.Linear


def _deepseek_v3_experts() -> type[nn.Module]:
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Experts

    return DeepseekV3Experts


def _replace_deepseek_v3_experts(
    source: nn.Module, *, fqn: str, policy: LowPrecisionPolicy
) -> LowPrecisionModule:
    from quaver.models.deepseek_v3_experts import replace_deepseek_v3_low_precision_experts

    return replace_deepseek_v3_low_precision_experts(source, fqn=fqn, policy=policy)


MODULE_TYPES: dict[str, Callable[[], type[nn.Module]]] = {
    "torch.nn.Linear": _linear,
    "transformers.models.deepseek_v3.modeling_deepseek_v3.DeepseekV3Experts": _deepseek_v3_experts,
}
FACTORIES: dict[str, ReplacementFactory] = {
    "low_precision_linear": replace_low_precision_linear,
    "deepseek_v3_low_precision_experts": _replace_deepseek_v3_experts,
}


def bind_rules(
    rules: Iterable[ReplacementRule],
    policy: LowPrecisionPolicy,
    *,
    factories: Mapping[str, ReplacementFactory] = FACTORIES,
) -> list[BoundRule]:
    """Rules with their classes and factories; PlanError for a name that this table does not hold."""
    return [_bind(rule, policy, factories) for rule in rules]


def _bind(
    rule: ReplacementRule, policy: LowPrecisionPolicy, factories: Mapping[str, ReplacementFactory]
) -> BoundRule:
    module_type = rule.module_class
    if module_type is None and rule.module_type in MODULE_TYPES:
        module_type = MODULE_TYPES[rule.module_type]()
    if module_type is None:
        raise PlanError(
            f"no class is bound to module_type {rule.module_type!r}",
            where=f"plan_overrides: {list(rule.match)}",
            remedy=f"use one of {sorted(MODULE_TYPES)}, or pass the class itself in Python",
        )
    make = factories.get(rule.replace_module)
    if make is None:
        raise PlanError(
            f"no factory is bound to replace_module {rule.replace_module!r}",
            where=f"plan_overrides: {list(rule.match)}",
            remedy=f"use one of {sorted(factories)}",
        )

    def factory(source: nn.Module, fqn: str) -> nn.Module:
        return make(source, fqn=fqn, policy=policy)

    return BoundRule(
        patterns=tuple(rule.match),
        module_type=module_type,
        exact_type=rule.exact_type,
        factory=factory,
        factory_name=rule.replace_module,
        low_precision=True,
    )
