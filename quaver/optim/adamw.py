"""AdamW over FP32 masters: which parameters decay, and the checks that make the groups trustworthy.

Weight decay belongs on matrices: norms and biases (one dimension) are left alone, embeddings decay like every
other matrix. Groups carry their name and the FQNs of their parameters, so that logs and checkpoints can speak
of both. Imports torch and `errors` alone.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from quaver.errors import PlanError


def build_adamw(
    named_parameters: Iterable[tuple[str, Tensor]],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> torch.optim.AdamW:
    """Fused AdamW with the groups "decay" (two or more dimensions) and "no_decay" (scalars and vectors).

    Args:
        named_parameters: (FQN, FP32 parameter that trains), each once; plain tensors or DTensors.
        lr: learning rate; the trainer sets that of the schedule before each step.
        betas: decay rates of the two moments.
        eps: added to the root of the second moment.
        weight_decay: decoupled decay of the group "decay".

    Raises:
        PlanError: no parameter, one that is frozen, is not FP32, or appears twice (by name or as a tied
            tensor).
    """
    # one kernel call takes tensors of one kind, so replicated (plain) ones stand apart from sharded ones
    groups: dict[str, list[tuple[str, Tensor]]] = {
        "decay": [],
        "no_decay": [],
        "decay_replicated": [],
        "no_decay_replicated": [],
    }
    members = list(named_parameters)
    sharded = any(isinstance(parameter, DTensor) for _, parameter in members)
    seen_names: set[str] = set()
    seen_tensors: dict[Tensor, str] = {}  # Tensor hashes by identity
    for fqn, parameter in members:
        _check(fqn, parameter, seen_names, seen_tensors)
        seen_names.add(fqn)
        seen_tensors[parameter] = fqn
        name = "decay" if parameter.ndim >= 2 else "no_decay"
        if sharded and not isinstance(parameter, DTensor):
            name += "_replicated"
        groups[name].append((fqn, parameter))
    if not seen_names:
        raise PlanError(
            "the optimiser has no parameter to train",
            where="model.freeze",
            remedy="freeze fewer modules: at least one parameter must train",
        )
    named_groups = [
        {"name": name, "params": held, "weight_decay": weight_decay if name.startswith("decay") else 0.0}
        for name, held in groups.items()
        if held
    ]
    return torch.optim.AdamW(named_groups, lr=lr, betas=betas, eps=eps, fused=True)


def _check(fqn: str, parameter: Tensor, names: set[str], tensors: dict[Tensor, str]) -> None:
    if fqn in names:
        what, remedy = "a parameter's name is given twice", "give each parameter once"
    elif parameter in tensors:
        what = f"the parameter is the same tensor as {tensors[parameter]}"
        remedy = "give tied parameters once (named_parameters() leaves duplicates out)"
    elif not parameter.requires_grad:
        what, remedy = "a frozen parameter was given to the optimiser", "leave frozen parameters out"
    elif parameter.dtype != torch.float32:
        what = f"the optimiser's parameter is {parameter.dtype}, not an FP32 master"
        remedy = "keep parameters at rest in FP32; the compute dtype is the mixed-precision policy's"
    else:
        return
    raise PlanError(what, where=fqn, remedy=remedy)
