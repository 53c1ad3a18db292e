"""Quantising a model's weights once they exist, and refreshing them after a successful optimiser step.

May import: modules, master, quantized, distributed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import cast

import torch
from torch import nn

from quaver.backends import Gemm, OperandError, PlannedSite
from quaver.distributed import bind, is_sharded, lazy_init, reshard_all
from quaver.errors import PlanError
from quaver.low_precision.master import MasterWeight
from quaver.low_precision.modules import LowPrecisionModule, refresh_parameter
from quaver.low_precision.quantized import QuantizedWeightTensor


def low_precision_modules(model: nn.Module) -> Iterator[tuple[str, LowPrecisionModule]]:
    """(FQN, module) of every module with quantised weights, each once."""
    for fqn, module in model.named_modules():
        if isinstance(module, LowPrecisionModule):
            yield fqn, module


def quantised_weights(model: nn.Module) -> dict[str, tuple[torch.Tensor, MasterWeight]]:
    """FQN -> (parameter, its local master), each weight once."""
    found: dict[str, tuple[torch.Tensor, MasterWeight]] = {}
    seen: set[int] = set()
    for _, module in low_precision_modules(model):
        for name, parameter, local in module._quantised():
            if id(parameter) not in seen:
                seen.add(id(parameter))
                found[module.weight_fqn(name)] = (parameter, local)
    return found


def planned_sites(model: nn.Module) -> list[PlannedSite]:
    """The GEMM sites that the ledger must see: dense modules by module FQN, grouped ones by parameter FQN.

    A weight that trains must have its wgrad; dgrad is required where nothing of the model is frozen (below a
    frozen part, inputs want no gradient).
    """
    whole = all(parameter.requires_grad for parameter in model.parameters())
    sites = []
    for _, module in low_precision_modules(model):
        for name, kind in module.WEIGHTS.items():
            parameter = module._parameters[name]
            trains = parameter is not None and parameter.requires_grad
            wanted: dict[Gemm, bool] = {"fprop": True, "dgrad": whole, "wgrad": trains}
            required = tuple(gemm for gemm, always in wanted.items() if always)
            fqn = module.fqn if kind == "dense" else module.weight_fqn(name)
            sites.append(PlannedSite(fqn, kind, module.recipe.format, required))
    return sites


def quantize_weights(root: nn.Module, *, refresh: bool = True) -> list[str]:
    """Turns the FP32 parameters of all low-precision modules under `root` into masters; returns their FQNs.

    Args:
        root: a model, or one unit of it.
        refresh: derive codes at once; False where sharding follows, which starts from the masters anyway.

    Raises:
        PlanError: a parameter on meta, not FP32, or shared with a module that would go on without the codes.
    """
    owners = {id(module): module for _, module in low_precision_modules(root)}
    made: dict[int, nn.Parameter] = {}
    fqns = []
    for module in owners.values():
        for name in module.WEIGHTS:
            source = module._parameters[name]
            if isinstance(source, MasterWeight):
                continue
            fqn = module.weight_fqn(name)
            if source is None or source.is_meta or source.dtype is not torch.float32:
                state = "missing" if source is None else ("on meta" if source.is_meta else str(source.dtype))
                raise PlanError(
                    f"cannot quantise a weight that is {state}",
                    where=fqn,
                    remedy="materialise and initialise the module, upcast it to FP32, then quantise",
                )
            _check_unshared(source, fqn, root)
            if id(source) not in made:
                weight = MasterWeight(source.detach(), module.weight_spec(name))
                made[id(source)] = nn.Parameter(weight, requires_grad=source.requires_grad)
                if refresh:
                    cast(MasterWeight, made[id(source)]).refresh()
                fqns.append(fqn)
            module._parameters[name] = made[id(source)]
    return fqns


def _check_unshared(source: nn.Parameter, fqn: str, model: nn.Module) -> None:
    for other, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is source and not (
                isinstance(module, LowPrecisionModule) and name in module.WEIGHTS
            ):
                raise PlanError(
                    f"the weight is shared with {other}.{name}, which is not in low precision",
                    where=fqn,
                    remedy="leave this module out of the plan, or untie the two",
                )


def refresh(model: nn.Module) -> list[str]:
    """Derives the codes of every quantised weight from its master as it is now; returns the FQNs.

    Under FSDP2 it binds the shards to their parameters and frees gathered copies first. Not counted in
    `refresh_counts`, which counts optimiser steps.
    """
    _prepare_sharded(model)
    weights = quantised_weights(model)
    if not weights:
        raise PlanError(
            "the model has no quantised weight", where=type(model).__name__, remedy="quantize_modules first"
        )
    for parameter, local in weights.values():
        refresh_parameter(parameter, local)
    return list(weights)


def refresh_stale(model: nn.Module, *, after_step: bool) -> list[str]:
    """Refreshes the weights whose master was written; returns their FQNs. A step that wrote nothing refreshes none."""
    _prepare_sharded(model)
    done = []
    for fqn, (parameter, local) in quantised_weights(model).items():
        if local.stale:
            refresh_parameter(parameter, local, after_step=after_step)
            done.append(fqn)
    return done


def _prepare_sharded(model: nn.Module) -> None:
    if is_sharded(model):
        lazy_init(model)
        bind(model)
        reshard_all(model)


def refresh_low_precision_weights(
    params: Iterable[QuantizedWeightTensor | MasterWeight], master_params: Iterable[torch.Tensor]
) -> None:
    """Refreshes weights from their masters, pair by pair, after a successful update.

    Args:
        params: weights in flight, or at rest (whose own master must be the one given).
        master_params: FP32 masters of the same shapes, in the same order.
    """
    weights, masters = list(params), list(master_params)
    if len(weights) != len(masters):
        raise OperandError(f"{len(weights)} weights but {len(masters)} masters")
    for weight, master in zip(weights, masters):
        plain = master.master if isinstance(master, MasterWeight) else master
        if isinstance(weight, MasterWeight):
            if plain is not weight.master:
                with torch.no_grad():
                    weight.copy_(plain)
            weight.refresh(after_step=True)
        else:
            weight.refresh_from_master(plain)
