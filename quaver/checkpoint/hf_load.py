"""Puts a Hugging Face folder's weights into a model: unit by unit as the build makes it, or all at once.

A unit on meta gets FP32 parameters at once, without random numbers first, so peak memory is that of the unit. What
files do not carry (rotary tables) transformers computes from the config. May import: models, low_precision,
distributed, this room's `files`, `hf_import` and `hf_layout`, errors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from quaver.checkpoint.files import cannot_start
from quaver.checkpoint.hf_import import HFSource, ImportReport
from quaver.checkpoint.hf_layout import other_layouts
from quaver.distributed import local_tensor
from quaver.errors import PlanError
from quaver.low_precision import MasterWeight, refresh_stale
from quaver.models import init_units, materialise_unit


@dataclass(frozen=True)
class _Slot:
    """A place in a module tree that holds a tensor."""

    fqn: str
    module: nn.Module
    name: str
    tensor: torch.Tensor
    persistent: bool

    def put(self, value: torch.Tensor) -> None:
        table = self.module._parameters if self.name in self.module._parameters else self.module._buffers
        table[self.name] = value  # type: ignore[assignment]


def wanted_shapes(model: nn.Module, prefix: str = "") -> dict[str, tuple[int, ...]]:
    """FQN -> shape of every parameter and persistent buffer; meta is fine, a shared tensor counts once."""
    return {slot.fqn: tuple(slot.tensor.shape) for slot in _stored_slots(model, prefix)}


def check_source(model: nn.Module, source: HFSource) -> None:
    """Holds a folder against a whole model, on meta: what a build calls before it allocates anything.

    Raises:
        CheckpointError: as `HFSource.check`.
    """
    source.check(wanted_shapes(model), whole=frozenset(other_layouts(model)))


def load_unit(
    model: PreTrainedModel, fqn: str, unit: nn.Module, source: HFSource, device: torch.device | str
) -> list[str]:
    """Gives one unit of `init_units`, on meta, its values from the files; in place of `materialise_unit`.

    Parameters and persistent buffers become FP32, the exact upcast of the file's values, whatever the model was
    built in. Call `source.finish()` after the last unit.

    Args:
        model: the whole model.
        fqn: the unit's name.
        unit: the unit.
        source: the folder.
        device: where the values are to live.

    Returns:
        The FQNs loaded.

    Raises:
        CheckpointError: as `HFSource.tensors_for`.
        PlanError: the unit is not on meta.
    """
    slots = [slot for slot in _slots(unit, fqn) if slot.tensor.is_meta]
    if not slots:
        raise PlanError(
            "the unit is not on meta",
            where=fqn or type(unit).__name__,
            remedy="load each unit of a meta-built model exactly once",
        )
    stored = {slot.fqn: slot for slot in _once(slots) if slot.persistent}
    shapes = {fqn: tuple(slot.tensor.shape) for fqn, slot in stored.items()}
    values = source.tensors_for(shapes, whole=_whole(unit, fqn))  # checked before the unit is touched
    if any(not slot.persistent for slot in slots):
        materialise_unit(model, unit, device)
    made: dict[int, torch.Tensor] = {}
    for name, value in values:
        slot = stored[name]
        _require_float(slot)
        new = value.to(device)
        if isinstance(slot.tensor, nn.Parameter):
            new = nn.Parameter(new, requires_grad=slot.tensor.requires_grad)
        made[id(slot.tensor)] = new
        slot.put(new)
        del value, new
    for slot in slots:  # further names of a shared tensor
        if slot.persistent:
            slot.put(made[id(slot.tensor)])
    return list(shapes)


def load_into(model: nn.Module, source: HFSource, device: torch.device | str = "cpu") -> ImportReport:
    """Loads a whole model: on meta unit by unit, or, where it exists already, by copying into its tensors.

    Existing tensors must be FP32, plain, sharded (each rank takes its shard) or quantised (codes are derived
    anew afterwards). Nothing is written before every key has been checked.

    Args:
        model: a model; on meta it must be one of transformers.
        source: the folder.
        device: where the values of a model on meta are to live.

    Returns:
        What every key of the files became.

    Raises:
        CheckpointError: as `HFSource.check` and `HFSource.finish`; a tensor of the model that is not FP32.
    """
    check_source(model, source)
    slots = {slot.fqn: slot for slot in _stored_slots(model, "")}
    if any(slot.tensor.is_meta for slot in slots.values()):
        if not isinstance(model, PreTrainedModel):
            raise PlanError(
                f"a {type(model).__name__} on meta is no model of transformers", where="load_into"
            )
        for fqn, unit in init_units(model):
            load_unit(model, fqn, unit, source, device)
        return source.finish()
    for slot in slots.values():
        _require_float(slot)
        if slot.tensor.dtype is not torch.float32:
            raise cannot_start(
                f"loading into {slot.tensor.dtype} would round; wanted torch.float32",
                where=slot.fqn,
                remedy="convert the model with .float() first",
            )
    shapes = {fqn: tuple(slot.tensor.shape) for fqn, slot in slots.items()}
    values = source.tensors_for(shapes, whole=_whole(model, ""))
    with torch.no_grad():
        for fqn, value in values:
            _copy(slots[fqn].tensor, value)
            del value
    if any(isinstance(local_tensor(slot.tensor), MasterWeight) for slot in slots.values()):
        refresh_stale(model, after_step=False)
    return source.finish()


def _copy(target: torch.Tensor, value: torch.Tensor) -> None:
    if isinstance(target, DTensor):
        # every rank has read the whole tensor: no communication, each keeps its own part
        value = value.to(target.device)
        shard = distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None)
        local_tensor(target).copy_(local_tensor(shard))
    else:
        target.copy_(value)


def _whole(unit: nn.Module, prefix: str) -> frozenset[str]:
    return frozenset(f"{prefix}.{fqn}" if prefix else fqn for fqn in other_layouts(unit))


def _stored_slots(module: nn.Module, prefix: str) -> list[_Slot]:
    return [slot for slot in _once(_slots(module, prefix)) if slot.persistent]


def _slots(module: nn.Module, prefix: str) -> Iterator[_Slot]:
    for fqn, part in module.named_modules(prefix=prefix):
        for table in (part._parameters, part._buffers):
            for name, tensor in table.items():
                if tensor is not None:
                    persistent = name not in part._non_persistent_buffers_set
                    yield _Slot(f"{fqn}.{name}" if fqn else name, part, name, tensor, persistent)


def _once(slots: Iterator[_Slot] | list[_Slot]) -> list[_Slot]:
    first: dict[int, _Slot] = {}
    for slot in slots:
        first.setdefault(id(slot.tensor), slot)
    return list(first.values())


def _require_float(slot: _Slot) -> None:
    if not slot.tensor.is_floating_point():
        raise cannot_start(f"not supported: loading a tensor of {slot.tensor.dtype}", where=slot.fqn)
