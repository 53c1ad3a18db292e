"""Gives a meta-built model its values block by block, in the order and with the draws of transformers itself.

Seeding once and walking `init_units` gives the same bits as `model.initialize_weights()` on the whole model,
but at any time only one block exists unsharded: the caller quantises and shards each unit before the next is
made. transformers initialises children first, depth first, and decides by `isinstance` what to draw for a
module, so a replacement class must be a *subclass* of the class that it replaces; anything that no
initialiser knows is found and refused, since its memory would hold whatever was there before. Imports torch,
transformers and `quaver.errors`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers import initialization as hf_initialization

from quaver.errors import PlanError

# Only walked through: their children are units of their own, so no unit is larger than one block.
_WALKED = (PreTrainedModel, nn.ModuleList, nn.ModuleDict)


def init_units(model: PreTrainedModel) -> list[tuple[str, nn.Module]]:
    """The blocks of a model in initialisation order: embedding, layers, final norm, rotary, head.

    A parent that is only walked through (the model itself, a list of layers) comes after its children, and
    only where it owns tensors; `materialise_unit` then makes those alone.

    Returns:
        (FQN, module) for each unit; together they own every parameter and buffer of the model once.

    Raises:
        PlanError: a parameter that two units share (tied embeddings): they could not be sharded one by one.
    """
    units = list(_walk("", model, set()))
    owner: dict[int, str] = {}
    for fqn, unit in units:
        for module in _modules(unit):
            for parameter in module.parameters(recurse=False):
                first = owner.setdefault(id(parameter), fqn)
                if first != fqn:
                    raise PlanError(
                        f"{first} and {fqn} share a parameter, and blocks are built one by one",
                        where=f"{first} and {fqn}",
                        remedy="untie them (model.config_overrides.tie_word_embeddings: false)",
                    )
    return units


def materialise_unit(model: PreTrainedModel, module: nn.Module, device: torch.device | str) -> None:
    """Allocate one unit's tensors on `device` and initialise them as transformers would, in place.

    Dtypes, `requires_grad` and aliasing inside the unit stay. Random numbers come from torch's global
    generator.

    Args:
        model: the whole model, which knows how its modules are initialised.
        module: a unit of `init_units`.
        device: where the values are to live.

    Raises:
        PlanError: the unit is not on meta (made twice), or holds a tensor that no initialiser of transformers
            writes.
    """
    made = _allocate(module, torch.device(device))
    with torch.no_grad(), hf_initialization.guard_torch_init_functions():
        if isinstance(module, _WALKED):
            _owner(model, module)._initialize_weights(module)
        else:
            _initialise(module, _owner(model, module))
    for name, tensor in made:
        if _is_marked(tensor):
            raise PlanError(
                f"transformers does not initialise {name} of a {type(module).__name__}",
                where=_fqn(model, module),
                remedy="a replacement class must be a subclass of the class it replaces, with the same names",
            )


def materialise(
    model: PreTrainedModel,
    device: torch.device | str,
    on_unit: Callable[[str, nn.Module], None] | None = None,
) -> None:
    """Materialise every unit in order; `on_unit(fqn, module)` runs after each, before the next one exists.

    Seed torch right before. Raises `PlanError` as `init_units` and `materialise_unit` do.
    """
    for fqn, module in init_units(model):
        materialise_unit(model, module, device)
        if on_unit is not None:
            on_unit(fqn, module)


def _walk(fqn: str, module: nn.Module, seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
    if id(module) in seen:
        return
    seen.add(id(module))
    if isinstance(module, _WALKED):
        for name, child in module.named_children():
            yield from _walk(f"{fqn}.{name}" if fqn else name, child, seen)
    if any(True for owner in _modules(module) for _ in _tensors(owner)):
        yield fqn, module


def _modules(unit: nn.Module) -> list[nn.Module]:
    """The modules whose tensors belong to a unit."""
    return [unit] if isinstance(unit, _WALKED) else list(unit.modules())


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for table in (module._parameters, module._buffers):
        for name, tensor in table.items():
            if tensor is not None:
                yield name, tensor


def _allocate(unit: nn.Module, device: torch.device) -> list[tuple[str, torch.Tensor]]:
    """Replace the unit's meta tensors by marked, uninitialised ones; one new tensor for each old one."""
    made: dict[int, tuple[str, torch.Tensor]] = {}
    for module in _modules(unit):
        for name, tensor in list(_tensors(module)):
            if not tensor.is_meta:
                if id(tensor) in {id(new) for _, new in made.values()}:
                    continue
                raise PlanError(
                    f"{name} of a {type(module).__name__} is on {tensor.device}, not on meta",
                    where=type(unit).__name__,
                    remedy="materialise each unit of a meta-built model exactly once",
                )
            if id(tensor) not in made:
                new = torch.empty_like(tensor, device=device)
                if isinstance(tensor, nn.Parameter):
                    new = nn.Parameter(new, requires_grad=tensor.requires_grad)
                _mark(new)
                made[id(tensor)] = (name, new)
            table = module._parameters if name in module._parameters else module._buffers
            table[name] = made[id(tensor)][1]  # type: ignore[assignment]
        module._is_hf_initialized = False  # type: ignore[assignment]
    return list(made.values())


def _initialise(module: nn.Module, owner: PreTrainedModel) -> None:
    """Children first, depth first; a nested model initialises its own part."""
    for child in module.children():
        _initialise(child, child if isinstance(child, PreTrainedModel) else owner)
    owner._initialize_weights(module)


def _mark(tensor: torch.Tensor) -> None:
    """Write a value that no initialiser draws to both ends of a tensor."""
    if tensor.numel():
        flat = tensor.detach().view(-1)
        flat[0] = flat[-1] = float("nan") if tensor.is_floating_point() else _sentinel(tensor.dtype)


def _is_marked(tensor: torch.Tensor) -> bool:
    if not tensor.numel() or tensor.dtype == torch.bool:
        return False
    ends = tensor.detach().view(-1)[[0, -1]]
    if tensor.is_floating_point():
        return bool(ends.isnan().any())
    return bool((ends == _sentinel(tensor.dtype)).any())


def _sentinel(dtype: torch.dtype) -> int:
    return 1 if dtype == torch.bool else torch.iinfo(dtype).max - 1


def _owner(model: PreTrainedModel, module: nn.Module) -> PreTrainedModel:
    """The innermost model around (or equal to) a module: its initialiser is the one that applies."""
    if isinstance(module, PreTrainedModel):
        return module
    owner = model
    for part in model.modules():  # parents come before their children
        if isinstance(part, PreTrainedModel) and any(child is module for child in part.modules()):
            owner = part
    return owner


def _fqn(model: nn.Module, module: nn.Module) -> str:
    return next((fqn for fqn, part in model.named_modules() if part is module), type(module).__name__)
