"""At rest: `MasterWeight`, the FP32 weight that optimisers, state dicts and FSDP see, its codes beside it.

The ops of optimisers, state dicts, clipping and DTensor unwrap to the FP32 master; an op that is not known to be
safe raises, as it could be a GEMM in high precision. What the class adds is a cache of physical eight-bit tensors
that all its views share, and a count of writes: reading the cache after a write and before a refresh raises,
naming the weight. May import: master_ops, quantized, recipe, distributed, errors.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from quaver.backends import Orientation, QuantizedOperand
from quaver.distributed import (
    FSDPBinding,
    FSDPExtension,
    FSDPGatherContext,
    GatherMetadata,
    check_outputs,
    schema_of,
)
from quaver.errors import PlanError, StaleWeightError
from quaver.low_precision.master_ops import (
    CASTS,
    KEEPS_CLASS,
    is_allowed,
    is_inplace,
    is_view,
    moves_nothing,
    remedy_for,
    written,
)
from quaver.low_precision.quantized import (
    FlightState,
    Physical,
    QuantizedWeightTensor,
    WeightSpec,
    check_master,
)
from quaver.low_precision.shard import Shard

aten = torch.ops.aten


@dataclass
class WeightState:
    """What all views of one master share: the codes, and whether they still belong to the master."""

    physical: Physical = field(default_factory=dict)
    writes: int = 0
    fresh_at: int = -1
    skipped: int = 0  # writes since fresh_at by fused steps that a gradient scaler had told to change nothing
    version: int = 0
    refreshes: int = 0  # after optimiser steps; the first quantisation is not one
    binding: FSDPBinding | None = None
    shard: Shard | None = None
    source: torch.Tensor | None = None  # the plain master that the codes were derived from ...
    seen: int = 0  # ... and torch's version counter of it then: moved by writes through plain aliases

    @property
    def stale(self) -> bool:
        """True if the master was written, by whatever way, since the codes were derived, or they never were."""
        if self.fresh_at != self.writes:
            return True
        return self.source is not None and self.source._version != self.seen

    @property
    def unmoved(self) -> bool:
        """True if all that happened to the master since the codes were derived are skipped steps."""
        aliased = self.source is not None and self.source._version != self.seen
        return not aliased and 0 < self.skipped == self.writes - self.fresh_at

    def moved_on(self, version: int) -> Callable[[], bool]:
        """Whether what was gathered at a version is outdated by now."""
        return lambda: self.stale or self.version != version


class MasterWeight(FSDPExtension, torch.Tensor):
    """An FP32 master [N, K] or [E, N, K] (or a shard of one) with its eight-bit cache."""

    master: torch.Tensor
    spec: WeightSpec
    state: WeightState
    owner: WeightState | None  # of a partial view: the state of the weight that a write through it changes

    @staticmethod
    def __new__(
        cls: type[MasterWeight],
        master: torch.Tensor,
        spec: WeightSpec,
        state: WeightState | None = None,
        owner: WeightState | None = None,
    ) -> MasterWeight:
        """A wrapper over a plain FP32 tensor."""
        return torch.Tensor._make_wrapper_subclass(
            cls,
            master.shape,
            strides=master.stride(),
            storage_offset=master.storage_offset(),
            dtype=master.dtype,
            device=master.device,
        )

    def __init__(
        self,
        master: torch.Tensor,
        spec: WeightSpec,
        state: WeightState | None = None,
        owner: WeightState | None = None,
    ) -> None:
        if master.dtype is not torch.float32:
            check_master(master, spec.fqn)
        self.master = master
        self.spec = spec
        self.state = state if state is not None else WeightState()
        self.owner = owner

    # the cache ---------------------------------------------------------------------------------------------

    @property
    def fqn(self) -> str:
        """The weight's name."""
        return self.spec.fqn

    @property
    def version(self) -> int:
        """Counts every derivation of the codes."""
        return self.state.version

    @property
    def stale(self) -> bool:
        """True if the master was written, through this weight or a plain alias, since its codes were derived."""
        return self.state.stale

    @property
    def physical(self) -> Physical:
        """The codes; StaleWeightError if the master has moved on since they were derived."""
        state = self.state
        if self.stale:
            written = "was written since its codes were derived"
            raise StaleWeightError(
                f"the quantised weight {'has not been quantised yet' if state.version == 0 else written}",
                where=self.fqn,
                remedy="call quaver.attach(optimizer, model) so that each optimizer step refreshes it, or "
                "quaver.refresh(model) after writing it yourself",
            )
        return state.physical

    def select(self, orientation: Orientation) -> QuantizedOperand:  # type: ignore[override]
        """The operand of an orientation."""
        return self.spec.recipe.weight_class.operand(self.physical, self.spec, orientation)

    @torch.no_grad()
    def refresh(self, *, shard: Shard | None = None, after_step: bool = False) -> None:
        """Derives the codes from the master as it is now.

        Args:
            shard: where this master's rows lie in the whole weight; its ranks then agree on shared scales.
            after_step: count it as a refresh that an optimiser step caused; one that was skipped does not count,
                but derives all the same, because ranks that disagree on the skip must still meet in a shared scale.
        """
        state, master = self.state, self.master
        counts = after_step and not state.unmoved
        state.physical = self.spec.recipe.weight_class.quantize_master(master, self.spec, shard)
        state.fresh_at = state.writes
        state.source, state.seen = (None, 0) if master.is_inference() else (master, master._version)
        state.shard = shard
        state.version += 1
        state.refreshes += int(counts)
        state.skipped = 0

    # gather protocol ---------------------------------------------------------------------------------------

    @property
    def fsdp_binding(self) -> FSDPBinding | None:
        """The FSDP parameter that this shard belongs to."""
        return self.state.binding

    @fsdp_binding.setter
    def fsdp_binding(self, binding: FSDPBinding | None) -> None:
        self.state.binding = binding

    def pre_all_gather(
        self, context: FSDPGatherContext, logical_shape: torch.Size, world_size: int
    ) -> tuple[tuple[torch.Tensor, ...], GatherMetadata]:
        """The physical tensors that this phase needs."""
        physical = self.physical
        names = self.spec.recipe.weight_class.gather_fields(self.spec, context, self.state.shard)
        fields = {name: physical[name] for name in names}
        metadata = GatherMetadata(schema_of(fields), tuple(logical_shape), world_size, self.version)
        return tuple(fields.values()), metadata

    def post_all_gather(
        self,
        outputs: tuple[torch.Tensor, ...],
        metadata: GatherMetadata,
        out: Any = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> torch.Tensor:
        """The whole weight in flight."""
        weight_class = self.spec.recipe.weight_class
        fields = weight_class.fold_gathered(
            check_outputs(outputs, metadata, self.fqn), self.spec, self.state.physical
        )
        if out is None:
            flight = FlightState(metadata.version, self.state.moved_on(metadata.version), dtype)
            return weight_class(fields, metadata.logical_shape, self.spec, flight)
        if not isinstance(out, QuantizedWeightTensor):
            raise StaleWeightError(f"gather into a {type(out).__name__}", where=self.fqn)
        out.physical.clear()
        out.physical.update(fields)
        out.flight.version, out.flight.moved_on = metadata.version, self.state.moved_on(metadata.version)
        return out

    # tensor subclass ---------------------------------------------------------------------------------------

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        status = "stale" if self.stale else "fresh"
        return f"MasterWeight({self.fqn!r}, {tuple(self.shape)}, {self.spec.recipe.id}, {status})"

    @property
    def data(self) -> torch.Tensor:
        """As in torch: a detached alias."""
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        raise StaleWeightError(
            "p.data = ... would leave the master and its codes behind without a word",
            where=self.fqn,
            remedy="write in place (`with torch.no_grad(): p.copy_(value)`), then quaver.refresh(model)",
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> MasterWeight:
        copy = MasterWeight(self.master.detach().clone(), deepcopy(self.spec, memo))
        if not self.stale:
            copy.refresh()
        copy.requires_grad_(self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            copy._is_param = True
        memo[id(self)] = copy
        return copy

    def _view(self, master: torch.Tensor) -> MasterWeight:
        """A view on (part of) the master: the whole shares the codes, a part knows whose writes it makes."""
        whole = master.numel() == self.master.numel()
        state, owner = (self.state, self.owner) if whole else (None, self.owner or self.state)
        # a view of an ordinary tensor is an ordinary one in inference mode too
        with torch.inference_mode(self.is_inference()):
            return MasterWeight(master, self.spec, state, owner)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        if torch._guards.TracingContext.try_get() is not None:
            raise PlanError(
                "torch.compile cannot trace a model with quantised weights",
                where=self.fqn,
                remedy="run it eagerly, or compile submodules that have none",
            )
        return ["master"], self.spec

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, torch.Tensor], spec: Any, size: Any, stride: Any
    ) -> MasterWeight:
        return cls(inner["master"], spec)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        first = next(x for x in tree_leaves((args, kwargs)) if isinstance(x, MasterWeight))
        if not is_allowed(func):
            parts = func.decompose(*args, **kwargs)  # composite ops come whole in inference mode
            if parts is not NotImplemented:
                return parts
            raise StaleWeightError(
                f"{func} is not allowed on a quantised weight: it would compute in high precision without a word",
                where=first.fqn,
                remedy=remedy_for(func),
            )
        if func in (aten.detach.default, aten.alias.default):
            # the same plain master, so that writes through either are seen by the one version counter
            return first._view(first.master)
        skipped = int(moves_nothing(func, kwargs))
        for leaf in written(func, args, kwargs):  # autograd's own version counter never moves here
            if isinstance(leaf, MasterWeight):
                for state in (leaf.state, leaf.owner):
                    if state is not None:
                        state.writes += 1
                        state.skipped += skipped
        plain_args, plain_kwargs = tree_map(
            lambda x: x.master if isinstance(x, MasterWeight) else x, (args, kwargs)
        )
        result = func(*plain_args, **plain_kwargs)
        if args and isinstance(args[0], MasterWeight) and is_inplace(func):
            return args[0]
        if func.overloadpacket in CASTS and result.dtype is not torch.float32:
            raise StaleWeightError(
                f"a {result.dtype} copy of a quantised weight would compute in high precision without a word",
                where=first.fqn,
                remedy="call the low-precision module, or cast .master (or a state_dict() tensor) where it is meant",
            )
        view = is_view(func)
        if func.overloadpacket not in KEEPS_CLASS and not view:
            return result

        def wrap(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.dtype is not torch.float32:
                return tensor
            return first._view(tensor) if view else MasterWeight(tensor, first.spec)

        return tree_map_only(torch.Tensor, wrap, result)
