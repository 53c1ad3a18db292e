"""Which keys a run wants of a checkpoint, held strictly against those that it has.

May import: files, index, views.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from quaver.checkpoint.files import cannot_start
from quaver.checkpoint.index import DTYPES, Index
from quaver.checkpoint.views import MASTER, MODEL, MOMENTS, OPTIM, STEP, States, buffer_view

Wanted = dict[str, tuple[list[int], torch.dtype]]


def wanted_keys(model: nn.Module, states: States) -> Wanted:
    """Key -> (size, dtype) of all that the checkpoint must hold."""
    wanted: Wanted = {}
    for fqn, parameter in model.named_parameters():
        size = list(parameter.shape)
        wanted[f"{MODEL}.{fqn}"] = (size, torch.bfloat16)
        wanted[f"{OPTIM}.{fqn}.{MASTER}"] = (size, torch.float32)
        if parameter in states:
            wanted |= {f"{OPTIM}.{fqn}.{name}": (size, torch.float32) for name in MOMENTS}
            wanted[f"{OPTIM}.{fqn}.{STEP}"] = ([], torch.float32)
    for fqn, buffer in buffer_view(model).items():
        wanted[f"{MODEL}.{fqn}"] = (list(buffer.shape), buffer.dtype)
    return wanted


def tolerated_keys(model: nn.Module, optimizer: bool) -> set[str]:
    """Keys that may be there and are not read: without `optimizer`, the moments of this model's parameters."""
    if optimizer:
        return set()
    return {f"{OPTIM}.{fqn}.{name}" for fqn, _ in model.named_parameters() for name in (*MOMENTS, STEP)}


def check_keys(index: Index, wanted: Wanted, tolerated: set[str], folder: Path) -> None:
    """CheckpointError with exit code 2 that names what is missing, extra, or of another shape or dtype."""
    problems = [f"{key} is missing" for key in sorted(wanted.keys() - index.tensors.keys())]
    extra = sorted(index.tensors.keys() - wanted.keys() - tolerated)
    problems += [f"{key} is not this run's" for key in extra]
    for key, (size, dtype) in wanted.items():
        stored = index.tensors.get(key)
        if stored is not None and (stored.size != size or DTYPES[stored.dtype] is not dtype):
            ours = f"{str(dtype).removeprefix('torch.')} {size}"
            problems.append(f"{key} is {stored.dtype} {stored.size}, this run's is {ours}")
    if problems:
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        moments_alone = all(p.split(" ")[0].rpartition(".")[2] in (*MOMENTS, STEP) for p in problems)
        raise cannot_start(
            f"the checkpoint does not fit the model: {'; '.join(problems[:3])}{more}",
            where=folder,
            remedy="freeze the same parameters as the saved run, or set checkpoint.load_optimizer: false"
            if moments_alone
            else "use the model that was saved (model.config_overrides)",
        )
