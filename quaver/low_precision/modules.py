"""`LowPrecisionLinear`, and what every module with quantised weights owes to state dicts, loading and moving.

A module is made from a source module (possibly on the meta device) and takes over its very Parameters; only
`quantize_weights`, once they hold FP32 values, turns them into `MasterWeight`s. May import: dense, master,
quantized, recipe, distributed, errors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from quaver.distributed import like_sharded, local_tensor
from quaver.errors import PlanError, StaleWeightError
from quaver.low_precision.dense import Weight, low_precision_linear
from quaver.low_precision.master import MasterWeight
from quaver.low_precision.quantized import QuantizedWeightTensor, WeightSpec
from quaver.low_precision.recipe import LowPrecisionPolicy, LowPrecisionRecipe
from quaver.low_precision.shard import shard_of


class LowPrecisionModule(nn.Module):
    """Mixin for modules some of whose parameters are quantised weights.

    Attributes:
        WEIGHTS: names of those parameters -> whether a dense or a grouped GEMM reads them.
        fqn: the module's FQN in the model.
        policy: what the replacement factory was handed.
    """

    WEIGHTS: ClassVar[dict[str, Literal["dense", "grouped"]]] = {}

    fqn: str
    policy: LowPrecisionPolicy

    @property
    def recipe(self) -> LowPrecisionRecipe:
        """Formats, scaling and backend of this module."""
        return self.policy.recipe

    def weight_fqn(self, name: str) -> str:
        """FQN of one of the quantised parameters."""
        return f"{self.fqn}.{name}" if self.fqn else name

    def weight_spec(self, name: str) -> WeightSpec:
        """The unchanging part of one weight."""
        return WeightSpec(self.weight_fqn(name), self.WEIGHTS[name], self.recipe)

    def _quantised(self) -> Iterator[tuple[str, torch.Tensor, MasterWeight]]:
        for name in self.WEIGHTS:
            parameter = self._parameters.get(name)
            if parameter is None:
                continue
            local = local_tensor(parameter)
            if isinstance(local, MasterWeight):
                yield name, parameter, local

    def quantised_weight(self, name: str) -> Weight:
        """A weight for a forward pass, at rest or in flight; PlanError before the build step that quantises."""
        weight = getattr(self, name)
        if not isinstance(weight, MasterWeight | QuantizedWeightTensor):
            raise PlanError(
                "forward before its weights were quantised",
                where=f"{self.weight_fqn(name)} is a {type(weight).__name__}",
                remedy="build in this order: plan, install, materialise, quantise, fully_shard",
            )
        return weight

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if keep_vars:
            return
        for name, parameter, local in self._quantised():
            # plain FP32 under the source's key: torch.save, safetensors and DCP see an ordinary tensor
            destination[prefix + name] = like_sharded(parameter, local.master.detach())

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *args: Any
    ) -> None:
        for name, _, _ in self._quantised():
            if local_metadata.get("assign_to_params_buffers"):
                raise StaleWeightError(
                    "load_state_dict(assign=True) would put a plain tensor in place of a quantised weight",
                    where=prefix + name,
                    remedy="load without assign: values are copied into the master, and its codes derived anew",
                )
            value = state_dict.get(prefix + name)
            if isinstance(value, torch.Tensor) and not value.dtype.is_floating_point:
                raise StaleWeightError(
                    f"a {value.dtype} tensor was given for a quantised weight",
                    where=prefix + name,
                    remedy="load logical weights; codes are derived from them",
                )
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)
        for name, parameter, local in self._quantised():
            if prefix + name in state_dict:
                refresh_parameter(parameter, local)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        held = {name: parameter for name, parameter, _ in self._quantised()}
        for name, _, local in self._quantised():
            probe = fn(torch.empty(0, dtype=torch.float32, device=local.device))
            if probe.dtype is not torch.float32:
                raise StaleWeightError(
                    f"moving a quantised module to {probe.dtype} would drop its FP32 master",
                    where=self.weight_fqn(name),
                    remedy="leave the model in FP32; activations may have any dtype, or use autocast",
                )
        plain = {name: p for name, p in held.items() if isinstance(p, MasterWeight)}
        for name in plain:
            self._parameters[name] = None
        try:
            super()._apply(fn, recurse)
        finally:
            self._parameters.update(plain)  # type: ignore[arg-type]
        for weight in plain.values():
            moved = fn(weight.master)
            if moved is weight.master:
                continue
            fresh = nn.Parameter(MasterWeight(moved, weight.spec), requires_grad=weight.requires_grad)
            if weight.grad is not None:
                fresh.grad = fn(weight.grad)
            # in place, so that modules that share the weight, and optimisers, go on with the same Parameter
            torch.utils.swap_tensors(weight, fresh)
            if not moved.is_meta:
                weight.refresh()
        return self


def refresh_parameter(parameter: torch.Tensor, local: MasterWeight, *, after_step: bool = False) -> None:
    """Refreshes one weight; a per-tensor scale is agreed over the shard group of a DTensor."""
    local.refresh(shard=shard_of(parameter, local.fqn), after_step=after_step)


class LowPrecisionLinear(LowPrecisionModule, nn.Linear):
    """nn.Linear whose fprop, dgrad and wgrad run in eight bits; the bias stays in high precision."""

    WEIGHTS: ClassVar[dict[str, Literal["dense", "grouped"]]] = {"weight": "dense"}

    @classmethod
    def from_linear(cls, source: nn.Linear, *, fqn: str, policy: LowPrecisionPolicy) -> LowPrecisionLinear:
        """Takes over the source's own weight and bias Parameters, on whatever device they are."""
        module = cls.__new__(cls)
        nn.Module.__init__(module)
        module.in_features, module.out_features = source.in_features, source.out_features
        module.fqn, module.policy = fqn, policy
        module.register_parameter("weight", source._parameters["weight"])
        module.register_parameter("bias", source._parameters["bias"])
        module.train(source.training)
        return module

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., K] -> [..., N] in the input's dtype, or autocast's."""
        weight = self.quantised_weight("weight")
        x = as_compute_dtype(input, self.fqn)
        if x.shape[-1] != self.in_features:
            raise PlanError(
                f"input of shape {tuple(input.shape)}, wanted [..., {self.in_features}]", where=self.fqn
            )
        y = low_precision_linear(x, weight, fqn=self.fqn, recipe=self.recipe)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def extra_repr(self) -> str:
        """As nn.Linear, with the recipe."""
        return f"{super().extra_repr()}, recipe={self.recipe.id}"


def as_compute_dtype(tensor: torch.Tensor, fqn: str) -> torch.Tensor:
    """The tensor in autocast's dtype where autocast is on, else as it is; BF16 and FP32 are quantised."""
    kind = tensor.device.type
    if torch.is_autocast_enabled(kind):
        tensor = tensor.to(torch.get_autocast_dtype(kind))
    if tensor.dtype not in (torch.bfloat16, torch.float32):
        raise PlanError(
            f"not supported: {tensor.dtype} activations",
            where=fqn,
            remedy="use BF16 or FP32 activations, or autocast to bfloat16",
        )
    return tensor


def replace_low_precision_linear(
    source: nn.Linear, *, fqn: str, policy: LowPrecisionPolicy
) -> LowPrecisionLinear:
    """The replacement factory of dense layers."""
    return LowPrecisionLinear.from_linear(source, fqn=fqn, policy=policy)
