"""The load-balancing bias of MoE routers, and the token counts that it is moved by.

The bias follows DeepSeek-V3 (arXiv 2412.19437, section 2.1.2, auxiliary-loss-free balancing): after each step an
expert that got more tokens than the mean loses `rate`, one that got fewer gains it. The bias only moves the
*choice* of experts, it has no gradient, and it is always FP32: in BF16 0.6 + 0.001 stays 0.6.
Imports torch, the MoE iterator and `quaver.errors`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from quaver.errors import CheckpointError, PlanError
from quaver.models.moe import ROUTER_BIAS, iter_moe_layers


@dataclass(frozen=True)
class RouterLoad:
    """How one MoE layer's tokens fell on its experts since the last update.

    Attributes:
        fqn: the MoE layer.
        counts: tokens per expert (each token counts once for each expert it chose), summed over the group.
        max_violation: max(counts) / mean(counts) - 1 (MaxVio); 0 is perfect balance.
        dead_experts: the experts that no token chose.
    """

    fqn: str
    counts: tuple[int, ...]
    max_violation: float
    dead_experts: tuple[int, ...]


class RouterBias:
    """Counts the tokens of every trainable router and moves its bias after each successful step.

    A router counts once for each micro-step: in the forward of a model in training mode with gradients on,
    and not in the forward that activation checkpointing repeats during backward. Reentrant checkpointing runs
    the *first* forward without gradients, so what decides is whether gradients were on where the root model
    was called. A router whose parameters are all frozen is left alone: neither counted nor moved.

    Args:
        model: the model, already materialised; its routers return (logits, weights, indices [T, k]).
        group: the ranks whose counts are summed; None: all ranks of torch.distributed where it is initialised
            (each sees other tokens, and biases that drift apart would route one model in two ways), else this
            process.

    Raises:
        PlanError: a router bias that is not FP32.
    """

    def __init__(self, model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self._root_has_grad: bool | None = None  # None: no forward of the root model is running
        self._gates: dict[str, nn.Module] = {}
        self._counts: dict[str, torch.Tensor] = {}
        self._handles: list[RemovableHandle] = [
            model.register_forward_pre_hook(self._enter_root),
            model.register_forward_hook(self._leave_root, always_call=True),
        ]
        for fqn, layer in iter_moe_layers(model):
            gate = layer.get_submodule("gate")
            parameters = list(gate.parameters())
            if parameters and not any(p.requires_grad for p in parameters):
                continue
            bias = getattr(gate, ROUTER_BIAS, None)
            if bias is not None and bias.dtype != torch.float32:
                raise PlanError(
                    f"a router's bias is {bias.dtype}, not torch.float32",
                    where=f"{fqn}.gate.{ROUTER_BIAS}",
                    remedy="build the model with quaver.models.build_on_meta or from_hf_config",
                )
            self._gates[fqn] = gate
            self._counts[fqn] = torch.zeros(_experts(gate), dtype=torch.int64)
            self._handles.append(gate.register_forward_hook(self._counter(fqn)))

    @property
    def layers(self) -> tuple[str, ...]:
        """The FQNs of the MoE layers that are counted, in the model's order."""
        return tuple(self._gates)

    def update(self, rate: float) -> tuple[RouterLoad, ...]:
        """After a successful step: b += rate * sign(mean - load) for each expert, in FP32; counts start anew.

        Args:
            rate: the step of the bias; 0 leaves every bias as it is.

        Returns:
            The load of each layer, in the model's order.

        Raises:
            PlanError: a router saw no token since the last update, or has no bias to move.
        """
        loads = self.loads()
        biases = [self._bias_to_move(load, rate) for load in loads]  # all are checked before one moves
        for load, bias in zip(loads, biases):
            if bias is not None:
                # mean - load, times the number of experts, in integers: the sign is exact and ties stay ties.
                total = sum(load.counts)
                excess = torch.tensor([total - len(load.counts) * count for count in load.counts])
                bias.add_(torch.sign(excess).to(device=bias.device, dtype=torch.float32), alpha=rate)
        self.discard()
        return loads

    def _bias_to_move(self, load: RouterLoad, rate: float) -> torch.Tensor | None:
        """The bias that an update moves, or None at rate 0; a router that did not run is an error."""
        if not sum(load.counts):
            raise PlanError(
                "a router was not run since the last update",
                where=f"{load.fqn}.gate",
                remedy="update once after each step, whose forward ran in training mode",
            )
        if rate == 0:
            return None
        bias = self._gates[load.fqn]._buffers.get(ROUTER_BIAS)
        if bias is None:
            raise PlanError(
                "a router has no bias to balance with",
                where=f"{load.fqn}.gate.{ROUTER_BIAS}",
                remedy="set training.router_bias_update_rate: 0",
            )
        return bias

    def discard(self) -> None:
        """Forget the counts: after a step that was skipped."""
        for counts in self._counts.values():
            counts.zero_()

    def loads(self) -> tuple[RouterLoad, ...]:
        """The load of each layer so far, summed over the group (a collective: call it on every rank)."""
        counts = list(self._counts.values())
        group = self._group
        if group is None and dist.is_initialized():
            group = dist.group.WORLD
        if group is not None and group.size() > 1 and counts:
            total = torch.cat(counts)
            dist.all_reduce(total, op=dist.ReduceOp.SUM, group=group)
            counts = list(total.split([len(row) for row in counts]))
        return tuple(_load(fqn, row.tolist()) for fqn, row in zip(self._counts, counts))

    def state_dict(self) -> dict[str, torch.Tensor]:
        """This rank's counts since the last update (zero between steps): layer FQN -> int64 [experts]."""
        return {fqn: counts.detach().clone() for fqn, counts in self._counts.items()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take up the counts of a `state_dict`; all of them or none.

        Raises:
            CheckpointError: layers or experts that are not this model's, or counts that are not int64.
        """
        if state.keys() != self._counts.keys():
            raise CheckpointError(
                "router counts of other layers than this model's",
                where=", ".join(sorted(state.keys() ^ self._counts.keys())[:3]),
                remedy="resume with the model that was saved",
            )
        for fqn, counts in state.items():
            if counts.shape != self._counts[fqn].shape or counts.dtype != torch.int64:
                raise CheckpointError(
                    f"router counts are {counts.dtype} of shape {tuple(counts.shape)}, "
                    f"not torch.int64 of {tuple(self._counts[fqn].shape)}",
                    where=fqn,
                    remedy="resume with the model that was saved",
                )
        for fqn, counts in state.items():
            self._counts[fqn].copy_(counts)

    def close(self) -> None:
        """Remove all hooks and let go of the process group (gloo aborts if its group outlives the program)."""
        self._group = None
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _enter_root(self, module: nn.Module, args: Any) -> None:
        self._root_has_grad = torch.is_grad_enabled()

    def _leave_root(self, module: nn.Module, args: Any, output: Any) -> None:
        self._root_has_grad = None

    def _counter(self, fqn: str) -> Any:
        def count(gate: nn.Module, args: Any, output: Any) -> None:
            # Inside backward a forward is a recompute: torch runs it as part of a graph task.
            recompute = torch._C._current_graph_task_id() != -1
            has_grad = torch.is_grad_enabled() if self._root_has_grad is None else self._root_has_grad
            if recompute or not gate.training or not has_grad:
                return
            indices = _chosen_experts(fqn, output).detach().reshape(-1)
            if self._counts[fqn].device != indices.device:
                self._counts[fqn] = self._counts[fqn].to(indices.device)
            self._counts[fqn].scatter_add_(0, indices, torch.ones_like(indices))

        return count


def _experts(gate: nn.Module) -> int:
    """The number of experts that a router chooses from: its bias's length, else its weight's rows."""
    bias = getattr(gate, ROUTER_BIAS, None)
    return int(bias.numel() if bias is not None else gate.get_parameter("weight").shape[0])


def _chosen_experts(fqn: str, output: Any) -> torch.Tensor:
    """The indices [T, k] in a router's output (logits, weights, indices)."""
    indices = output[-1] if isinstance(output, tuple) else None
    if not isinstance(indices, torch.Tensor) or indices.dtype != torch.int64:
        raise PlanError(
            "a router does not return (logits, weights, indices)",
            where=f"{fqn}.gate",
            remedy="only routers in the form of transformers 5 are supported",
        )
    return indices


def _load(fqn: str, counts: list[int]) -> RouterLoad:
    mean = sum(counts) / len(counts)
    violation = max(counts) / mean - 1 if mean else 0.0
    dead = tuple(index for index, count in enumerate(counts) if count == 0)
    return RouterLoad(fqn, tuple(counts), violation, dead)
