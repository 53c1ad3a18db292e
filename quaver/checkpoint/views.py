"""What a checkpoint holds of a model and its optimiser, as plain tensors under Hugging Face's names.

The model view is what inference and export want: BF16 logical weights. The optimiser view is what training wants:
FP32 masters, moments, steps. Codes and scales are in neither, being derived from the masters. Both have the same
keys with recompute on or off and in every recipe, so a run of one recipe starts from a run of another.
May import: low_precision, distributed, errors.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import nn

from quaver.distributed import is_sharded, lazy_init, like_sharded, local_tensor, reshard_all
from quaver.errors import CheckpointError
from quaver.low_precision import MasterWeight

MODEL, OPTIM = "model", "optim"  # the two parts of a checkpoint: keys are "model.<fqn>", "optim.<fqn>.<what>"
MASTER, STEP, MOMENTS = "master", "step", ("exp_avg", "exp_avg_sq")
View = dict[str, torch.Tensor]
Tree = dict[str, View]
States = dict[torch.Tensor, dict[str, torch.Tensor]]


def settle(model: nn.Module) -> None:
    """Gives a sharded model its shards back: after a forward without gradients gathered copies may stand in
    their place, and torch replaces padded shards once, when it first initialises."""
    if is_sharded(model):
        lazy_init(model)
        reshard_all(model)


def model_view(model: nn.Module) -> View:
    """FQN -> BF16 logical weight (plain tensor or DTensor) of each parameter, and each persistent buffer as it is.

    Parameters are copies; buffers alias the model's own.

    Raises:
        CheckpointError: a parameter that is not FP32 at rest.
    """
    view = {fqn: like_sharded(p, master_of(fqn, p).to(torch.bfloat16)) for fqn, p in model.named_parameters()}
    return view | buffer_view(model)


def live_tree(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tree:
    """Both parts of a checkpoint, of which only masters and moments are the run's own storage, for `copied`."""
    buffers = {fqn: buffer.clone() for fqn, buffer in buffer_view(model).items()}
    return {MODEL: model_view(model) | buffers, OPTIM: optimizer_view(model, optimizer)}


def copied(live: Tree) -> Tree:
    """A `live_tree` on the CPU in storage of its own.

    Reads the tree alone and not the model, whose parameters stand for gathered ones during a forward.
    """
    return {
        MODEL: live[MODEL],
        OPTIM: {key: like_sharded(value, _copy(local_tensor(value))) for key, value in live[OPTIM].items()},
    }


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """By numpy, which takes one thread: torch's own copy would wake all of this process's, which train."""
    copy = torch.empty_like(tensor)
    np.copyto(copy.numpy(), tensor.numpy())
    return copy


def buffer_view(model: nn.Module) -> View:
    """FQN -> persistent buffer, aliased: of a DeepSeek-V3 the routers' FP32 biases."""
    view: View = {}
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                view[f"{prefix}.{name}" if prefix else name] = buffer.detach()
    return view


def master_of(fqn: str, parameter: torch.Tensor) -> torch.Tensor:
    """This rank's FP32 master as a plain tensor that aliases it."""
    local = local_tensor(parameter.detach())
    plain = local.master.detach() if isinstance(local, MasterWeight) else local
    if plain.dtype is not torch.float32:
        raise CheckpointError(
            f"a parameter at rest is {plain.dtype}, not an FP32 master",
            where=fqn,
            remedy="keep parameters in FP32; the compute dtype is the mixed-precision policy's",
        )
    return plain


def master_view(model: nn.Module) -> View:
    """ "<fqn>.master" -> FP32 master of each parameter, frozen or not, aliased."""
    return {
        f"{fqn}.{MASTER}": like_sharded(p, master_of(fqn, p).detach()) for fqn, p in model.named_parameters()
    }


def optimizer_view(model: nn.Module, optimizer: torch.optim.Optimizer) -> View:
    """The masters, and for each parameter that trains "<fqn>.exp_avg", "<fqn>.exp_avg_sq", "<fqn>.step".

    Live storage is aliased. A parameter that never took a step has zeros and step 0.

    Raises:
        CheckpointError: an optimiser with other state, or with parameters that are not the model's.
    """
    return master_view(model) | state_view(model, whole_states(model, optimizer))


def state_view(model: nn.Module, states: States) -> View:
    """The moments and steps of `states` under their parameters' names, aliased."""
    view: View = {}
    for fqn, parameter in model.named_parameters():
        state = states.get(parameter)
        if state is not None:
            for name in MOMENTS:
                view[f"{fqn}.{name}"] = like_sharded(parameter, local_tensor(state[name].detach()))
            view[f"{fqn}.{STEP}"] = state[STEP].detach()
    return view


def held_parameters(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, torch.Tensor, dict[str, object], dict[str, torch.Tensor]]]:
    """(FQN, parameter, its group, its state, which is empty before its first step) of all that the optimiser holds."""
    names = {parameter: fqn for fqn, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in names:
                raise CheckpointError(
                    "the optimiser holds a parameter that is not the model's",
                    where=f"a {type(optimizer).__name__} parameter of shape {tuple(parameter.shape)}",
                    remedy="build the optimiser from the model's parameters, after sharding it",
                )
            state = optimizer.state.get(parameter) or {}
            if state and state.keys() != {STEP, *MOMENTS}:
                raise CheckpointError(
                    f"not supported: optimiser state {sorted(state)}; checkpoints hold step, exp_avg and exp_avg_sq",
                    where=f"{type(optimizer).__name__}, {names[parameter]}",
                    remedy="use AdamW without amsgrad",
                )
            yield names[parameter], parameter, group, state


def empty_state(parameter: torch.Tensor, group: dict[str, object]) -> dict[str, torch.Tensor]:
    """The state that AdamW itself gives a parameter before its first step."""
    on_device = group.get("fused") or group.get("capturable")
    moments = {
        name: torch.zeros_like(parameter, memory_format=torch.preserve_format, requires_grad=False)
        for name in MOMENTS
    }
    step = torch.zeros((), dtype=torch.float32, device=parameter.device if on_device else "cpu")
    return {STEP: step, **moments}


def whole_states(model: nn.Module, optimizer: torch.optim.Optimizer) -> States:
    """The state of each held parameter: its own, or a new one of zeros that the optimiser does not have yet."""
    return {p: state or empty_state(p, group) for _, p, group, state in held_parameters(model, optimizer)}


def install_states(optimizer: torch.optim.Optimizer, states: States) -> None:
    """Gives the optimiser its loaded states; one at step 0 is left away, as it was when it was saved."""
    for parameter, state in states.items():
        if float(state[STEP]) == 0:
            optimizer.state.pop(parameter, None)
        else:
            optimizer.state[parameter] = state
