"""The one file that touches FSDP2's private parts; everything above speaks the protocol of gather.py.

Touched, and why (torch 2.13):
- `FSDPModule._get_fsdp_state()._fsdp_param_groups[*].fsdp_params`: to bind a shard to its FSDPParam, since
  torch passes neither the parameter's FQN nor the group's reshard policy to the gather extension.
- `FSDPParam.all_gather_outputs.clear()`: torch freezes number and sizes of the gather's buffers at the first
  gather, but a shard sends other fields in backward than in forward.
- `FSDPParam._sharded_local_tensor`, `FSDPParamGroup._reshard_after_forward` and `._use_post_forward_mesh`,
  `FSDPState._lazy_init()`.
- `_training_state` of both and `FSDPState._is_root`: a pass that raised leaves them inside it.
- `torch._C._current_graph_task_id()`: the phase is not passed in. The id is right for pre-backward, backward
  prefetch and recompute; the group's training state is wrong under recompute.
May import: torch, errors, gather, one_rank.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor

from quaver.distributed.gather import PROTOCOL, FSDPGatherContext, GatherMetadata, check_own_part
from quaver.distributed.one_rank import InPlaceReduceScatter
from quaver.errors import CapabilityError, PlanError, StaleWeightError

SUPPORTED_TORCH = (2, 13)
PARAMS_BF16 = MixedPrecisionPolicy(
    param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
)
PARAMS_FP32 = MixedPrecisionPolicy(
    param_dtype=torch.float32, reduce_dtype=torch.float32, cast_forward_inputs=False
)


def check_torch() -> None:
    """CapabilityError unless this is the torch whose private parts this file knows."""
    found = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if found != SUPPORTED_TORCH:
        raise CapabilityError(
            f"torch {torch.__version__} is not the version whose FSDP2 internals are known (2.13)",
            where="quaver/distributed/fsdp.py",
            remedy="pip install torch==2.13.0",
        )


class FSDPBinding:
    """What one local shard knows of the FSDP parameter that it belongs to; weak, so that nothing is kept alive."""

    def __init__(self, fsdp_param: Any, group: Any, fqn: str) -> None:
        self._param = weakref.ref(fsdp_param)
        self._group = weakref.ref(group)
        self.fqn = fqn
        self.last_fields: tuple[str, ...] | None = None
        self._settled: set[tuple[str, ...]] = set()

    def context(self) -> FSDPGatherContext:
        """The context of the gather that is about to start."""
        group = self._group()
        if group is None:
            raise StaleWeightError(f"{self.fqn}: its FSDP group is gone", remedy="shard and attach again")
        backward = torch._C._current_graph_task_id() != -1
        return FSDPGatherContext(
            phase="backward" if backward else "forward",
            reshard_after_forward=bool(group._reshard_after_forward),
            param_fqn=self.fqn,
        )

    def announce_fields(self, fields: tuple[str, ...]) -> None:
        """Frees torch's gather buffers when the set of fields changes between phases."""
        param = self._param()
        if param is not None and self.last_fields != fields:
            param.all_gather_outputs.clear()
            self.last_fields = fields

    def unsettled(self, fields: tuple[str, ...]) -> bool:
        """True until a gather of these fields was held against what this rank sent."""
        return fields not in self._settled

    def check_arrival(
        self,
        outputs: tuple[torch.Tensor, ...],
        sent: tuple[torch.Tensor, ...],
        metadata: GatherMetadata,
        rank: int,
    ) -> None:
        """Holds a first gather of some fields against what this rank sent; GatherError if they differ.

        It costs one comparison a parameter and set of fields. A weight two of whose fields hold the same values
        (all zeros, say) is looked at again at its next gather.
        """
        if check_own_part(outputs, sent, metadata, rank, self.fqn):
            self._settled.add(tuple(schema.field for schema in metadata.sent))


class FSDPExtension:
    """Mixin for local shards: torch's extension signatures on top of the gather protocol."""

    fsdp_binding: FSDPBinding | None

    def fsdp_pre_all_gather(
        self,
        mesh: DeviceMesh,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: MixedPrecisionPolicy,
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        """torch's hook before a gather: physical tensors to send, and metadata for the hook after it."""
        binding = self.fsdp_binding
        if binding is None:
            raise StaleWeightError(
                "a quantised weight was sharded with fully_shard but never attached",
                where=f"{type(module).__name__} of shape {tuple(outer_size)}",
                remedy="call quaver.attach(optimizer, model) after fully_shard (quaver.refresh(model) to infer)",
            )
        tensors, metadata = self.pre_all_gather(binding.context(), outer_size, mesh.size())  # type: ignore[attr-defined]
        fields = tuple(sent.field for sent in metadata.sent)
        binding.announce_fields(fields)
        # with one rank torch copies only the first tensor and gathers nothing: the local ones are the whole
        if mesh.size() == 1:
            return tensors, (metadata, tensors, None)
        held_against = (tensors, mesh.get_local_rank()) if binding.unsettled(fields) else None
        return tensors, (metadata, None, held_against)

    def fsdp_post_all_gather(
        self, outputs: tuple[torch.Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        """torch's hook after a gather: (whole tensor, tensors to free on reshard), or None with `out`."""
        plain, local, held_against = metadata
        if held_against is not None and self.fsdp_binding is not None:
            self.fsdp_binding.check_arrival(outputs, held_against[0], plain, held_against[1])
        whole = self.post_all_gather(outputs if local is None else local, plain, out, param_dtype)  # type: ignore[attr-defined]
        if out is not None:
            return None
        # nothing more to free on reshard: gathered tensors are views of torch's own gather buffers, which it
        # frees, and at one rank they are the local shard, which outlives every reshard
        return whole, ()


def shard_module(
    module: nn.Module,
    mesh: DeviceMesh,
    *,
    reshard_after_forward: bool,
    mp_policy: MixedPrecisionPolicy,
    replicated: set[nn.Parameter] | None = None,
) -> None:
    """`fully_shard` with an explicit reshard policy (None would turn into False on a root).

    Gradients are summed over the ranks, not averaged: losses are divided by global token counts beforehand.
    `replicated` parameters stay whole on every rank, outside of FSDP; see `sum_replicated`.
    """
    if not isinstance(reshard_after_forward, bool):
        raise PlanError(
            f"reshard_after_forward={reshard_after_forward!r}: gather extensions take true or false only",
            where="fsdp_config.reshard_after_forward",
        )
    fully_shard(
        module,
        mesh=mesh,
        reshard_after_forward=reshard_after_forward,
        mp_policy=mp_policy,
        ignored_params=replicated,
    )
    if mesh.size() == 1:
        module.set_custom_reduce_scatter(InPlaceReduceScatter())  # type: ignore[operator]
    else:
        module.set_gradient_divide_factor(1.0)  # type: ignore[operator]
    module.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]


def sum_replicated(parameters: Iterable[nn.Parameter]) -> None:
    """Sums the gradients of replicated parameters over all ranks, in place."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        for parameter in parameters:
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)


def set_gradient_sync(model: nn.Module, enabled: bool) -> None:
    """Whether the next backward reduces gradients over the ranks, or keeps them whole on each."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(enabled)


def fsdp_modules(model: nn.Module) -> list[FSDPModule]:
    """Every module of the model that `fully_shard` was called on."""
    return [m for m in model.modules() if isinstance(m, FSDPModule)]


def is_sharded(model: nn.Module) -> bool:
    """True if any part of the model is under FSDP2."""
    return bool(fsdp_modules(model))


def bind(model: nn.Module) -> list[str]:
    """Binds every shard with a gather extension to its FSDP parameter; returns the FQNs bound.

    Call after the last `fully_shard`; calling it again is harmless. Raises PlanError for what extensions cannot
    gather: a shard on another dimension than 0, or one that is resharded to fewer ranks after the forward pass.
    """
    check_torch()
    names = {id(p): name for name, p in model.named_parameters()}
    bound = []
    for fsdp_param, group in _fsdp_params(model):
        local = fsdp_param._sharded_local_tensor
        if not isinstance(local, FSDPExtension):
            continue
        fqn = str(names.get(id(fsdp_param.sharded_param)) or getattr(local, "fqn", "<unnamed>"))
        missing = [name for name in PROTOCOL if not callable(getattr(local, name, None))]
        if missing:
            raise PlanError(
                f"{type(local).__name__} lacks {' and '.join(missing)} of the gather protocol",
                where=fqn,
                remedy="implement both halves, as quaver.distributed.FSDPLocalTensorExtension describes them",
            )
        if fsdp_param.fsdp_placement.dim != 0:
            raise PlanError(
                f"sharded on dimension {fsdp_param.fsdp_placement.dim}; quantised weights are sharded on dimension 0",
                where=fqn,
                remedy="leave out shard_placement_fn for this parameter",
            )
        if group._use_post_forward_mesh:
            raise PlanError(
                "reshard_after_forward is a number of ranks: quantised weights reshard to all of them or not at all",
                where=fqn,
                remedy="call fully_shard with reshard_after_forward=True or False",
            )
        if local.fsdp_binding is None or local.fsdp_binding._param() is not fsdp_param:
            local.fsdp_binding = FSDPBinding(fsdp_param, group, fqn)
        bound.append(fqn)
    return bound


def _fsdp_params(model: nn.Module) -> Iterator[tuple[Any, Any]]:
    for module in fsdp_modules(model):
        for group in module._get_fsdp_state()._fsdp_param_groups:
            for fsdp_param in group.fsdp_params:
                yield fsdp_param, group


def lazy_init(model: nn.Module) -> None:
    """Runs the root's lazy initialisation now, so that no later step replaces local tensors."""
    if isinstance(model, FSDPModule):
        model._get_fsdp_state()._lazy_init()


def reshard_all(model: nn.Module) -> None:
    """Frees every gathered copy: after a no-grad forward one may stay, and would be stale after a refresh.

    A forward or backward pass that raised leaves FSDP inside that pass: it would free nothing, and the next pass
    would reduce no gradient. Such a pass is given up here, with what it had in flight.
    """
    modules = fsdp_modules(model)
    for module in modules:
        module.reshard()
    states = [module._get_fsdp_state() for module in modules]
    if any(_inside_a_pass(state) for state in states):
        for module, state in zip(modules, states):
            if state._is_root:
                module.reset_iter_state()


def _inside_a_pass(state: Any) -> bool:
    running = [state._training_state, *(group._training_state for group in state._fsdp_param_groups)]
    return any(training_state != TrainingState.IDLE for training_state in running)


def local_tensor(parameter: torch.Tensor) -> torch.Tensor:
    """The shard of a DTensor, or the tensor itself."""
    return parameter._local_tensor if isinstance(parameter, DTensor) else parameter


def like_sharded(parameter: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """`local` as a DTensor placed like `parameter`, or as it is where the parameter is no DTensor."""
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
