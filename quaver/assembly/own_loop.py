"""Eight-bit training without the trainer: `quantize_modules` on any FP32 module, `attach` to any optimiser.

    model = quaver.quantize_modules(net, quaver.LowPrecisionConfig(enabled=True), plan=[rule])
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    quaver.attach(optimizer, net)

May import: backends, config, distributed, low_precision, optim, surgery, rules.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from quaver.assembly.rules import bind_rules
from quaver.backends import Ledger
from quaver.config import LowPrecisionConfig, ReplacementRule
from quaver.distributed import is_sharded
from quaver.errors import PlanError
from quaver.low_precision import (
    FormatExtension,
    build_policy,
    quantised_weights,
    quantize_weights,
    refresh,
    refresh_stale,
)
from quaver.optim import inner_optimizer
from quaver.surgery import build_replacements, compile_plan, install

__all__ = ["QuantizedModel", "attach", "quantize_modules", "refresh"]


@dataclass(frozen=True)
class QuantizedModel:
    """What `quantize_modules` did: the (same) model, the hits of each pattern, and what ran so far."""

    model: nn.Module
    replacements: list[dict[str, Any]]
    ledger: Ledger

    @property
    def refresh_counts(self) -> dict[str, int]:
        """FQN of each quantised weight -> refreshes that optimiser steps caused."""
        return {fqn: local.state.refreshes for fqn, (_, local) in quantised_weights(self.model).items()}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward."""
        return self.model(*args, **kwargs)


def quantize_modules(
    model: nn.Module,
    config: LowPrecisionConfig,
    *,
    plan: Iterable[ReplacementRule] | ReplacementRule,
    formats: Sequence[FormatExtension] = (),
) -> QuantizedModel:
    """Replaces the planned modules of a materialised FP32 model in place, and quantises their weights.

    Args:
        model: any nn.Module whose planned weights are FP32.
        config: with `enabled=True`.
        plan: replacement rules; each pattern must hit.
        formats: formats beside the built-in ones that the config may name.

    Raises:
        PlanError: a plan that does not fit, a planned weight that is not FP32 (there would be no master), or a
            model that fully_shard, a tensor-parallel plan or DDP already holds; the model is then untouched.
        CapabilityError: the backend cannot run here.
    """
    if not config.enabled:
        raise PlanError(
            "low precision is off",
            where="LowPrecisionConfig.enabled",
            remedy="pass enabled=True, or do not call this",
        )
    ledger = Ledger(recipe=config.recipe_id)
    policy = build_policy(config, ledger, formats)
    rules = [plan] if isinstance(plan, ReplacementRule) else list(plan)
    if not rules:
        raise PlanError("the plan has no rule", where="plan", remedy="name at least one module pattern")
    _require_unsharded(model)
    compiled = compile_plan(model, bind_rules(rules, policy))
    for target in compiled.targets:
        _require_fp32(model.get_submodule(target.fqn), target.fqn)
    install(model, build_replacements(model, compiled))
    quantize_weights(model)
    return QuantizedModel(model, compiled.as_json(), ledger)


def _require_unsharded(model: nn.Module) -> None:
    """Sharding and DDP take hold of the very Parameters that quantising replaces."""
    held = next((name for name, p in model.named_parameters() if isinstance(p, DTensor)), None)
    reduced = next(
        (name for name, m in model.named_modules() if isinstance(m, DistributedDataParallel)), None
    )
    if held is None and reduced is None and not is_sharded(model):
        return
    if reduced is not None:
        what, where = "the model is under DistributedDataParallel already", reduced or type(model).__name__
    else:
        what, where = "the model is sharded already", held or type(model).__name__
    raise PlanError(
        f"{what}, so its weights can no longer be replaced by quantised ones",
        where=where,
        remedy="quantize_modules first, then fully_shard (or DDP), then the optimiser, then attach",
    )


def _require_fp32(module: nn.Module, fqn: str) -> None:
    for name, parameter in module.named_parameters(recurse=False):
        if parameter.is_meta or parameter.dtype is not torch.float32:
            kind = "on the meta device" if parameter.is_meta else str(parameter.dtype)
            raise PlanError(
                f"a planned weight is {kind}; its FP32 master would not exist",
                where=f"{fqn}.{name}",
                remedy="load or build the model in float32; activations may be BF16 (autocast)",
            )


def attach(optimizer: torch.optim.Optimizer, model: nn.Module) -> RemovableHandle:
    """Refreshes the model's quantised weights after each successful `optimizer.step()`.

    Call it after the optimiser exists and after any `fully_shard`. It refreshes once at once (not counted),
    binds the shards of FSDP2 to their parameters, and checks that the optimiser trains every trainable
    quantised weight, now and at each step.

    Returns:
        The hook's handle; `remove()` ends it.
    """
    inner = inner_optimizer(optimizer)
    refresh(model)
    _check_covered(inner, model)

    def after_step(*_: Any) -> None:
        _check_covered(inner, model)
        refresh_stale(model, after_step=True)

    return inner.register_step_post_hook(after_step)


def _check_covered(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    missing = [
        fqn for fqn, (p, _) in quantised_weights(model).items() if p.requires_grad and id(p) not in held
    ]
    if missing:
        raise PlanError(
            f"the optimiser does not hold {len(missing)} trainable quantised weights of the model",
            where=", ".join(missing[:5]),
            remedy="quantize_modules, then fully_shard, then build the optimiser from model.parameters(), then attach",
        )
