"""DeepSeek-V3's routed experts in eight bits: the adapter between the model's layout and the grouped SwiGLU.

It knows parameter names, the forward signature and the top-k combination; the numbers are in
quaver.low_precision.grouped. May import: low_precision, errors, transformers.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from torch import nn
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Experts

from quaver.errors import PlanError
from quaver.low_precision import (
    LowPrecisionModule,
    LowPrecisionPolicy,
    as_compute_dtype,
    low_precision_grouped_swiglu,
)

# How transformers describes stacked experts that are laid out as this adapter reads them.
_LAYOUT = {
    "is_transposed": False, "is_concatenated": True, "has_gate": True, "has_bias": False,
    "has_post_expert_norm": False, "_is_expert_parallel": False,
}  # fmt: skip


class DeepseekV3LowPrecisionExperts(LowPrecisionModule, DeepseekV3Experts):
    """gate_up_proj [E, 2F, H] (gate first) and down_proj [E, H, F], every GEMM in eight bits."""

    WEIGHTS: ClassVar[dict[str, Literal["dense", "grouped"]]] = {
        "gate_up_proj": "grouped",
        "down_proj": "grouped",
    }

    @classmethod
    def from_experts(
        cls, source: nn.Module, *, fqn: str, policy: LowPrecisionPolicy
    ) -> DeepseekV3LowPrecisionExperts:
        """Takes over the source's own Parameters; PlanError unless its activation is SiLU and its layout stacked."""
        act = type(source.act_fn).__name__
        if act not in ("SiLU", "SiLUActivation"):
            raise PlanError(f"not supported: experts with activation {act}, wanted SiLU", where=fqn)
        for flag, wanted in _LAYOUT.items():
            if getattr(source, flag, wanted) != wanted:
                raise PlanError(
                    f"not supported: experts whose {flag} is {getattr(source, flag)}, wanted {wanted}",
                    where=fqn,
                )
        experts: Any = source
        E, H, F = experts.num_experts, experts.hidden_dim, experts.intermediate_dim
        for name, shape in {"gate_up_proj": (E, 2 * F, H), "down_proj": (E, H, F)}.items():
            found = tuple(source.get_parameter(name).shape)
            if found != shape:
                raise PlanError(f"not supported: {name} of shape {found}, wanted {shape}", where=fqn)
        module = cls.__new__(cls)
        nn.Module.__init__(module)
        for name in ("num_experts", "hidden_dim", "intermediate_dim", "config", *_LAYOUT):
            if hasattr(source, name):
                setattr(module, name, getattr(source, name))
        module.act_fn = source.act_fn
        module.fqn, module.policy = fqn, policy
        for name in cls.WEIGHTS:
            module.register_parameter(name, source._parameters[name])
        module.train(source.training)
        return module

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """[T, H], [T, k] int64, [T, k] -> [T, H]."""
        gate_up, down = self.quantised_weight("gate_up_proj"), self.quantised_weight("down_proj")
        x = as_compute_dtype(hidden_states, self.fqn)
        return low_precision_grouped_swiglu(
            x,
            top_k_index,
            top_k_weights,
            gate_up,
            down,
            sites=(self.weight_fqn("gate_up_proj"), self.weight_fqn("down_proj")),
            recipe=self.recipe,
        )


def replace_deepseek_v3_low_precision_experts(
    source: nn.Module, *, fqn: str, policy: LowPrecisionPolicy
) -> DeepseekV3LowPrecisionExperts:
    """The replacement factory of DeepSeek-V3's routed experts."""
    return DeepseekV3LowPrecisionExperts.from_experts(source, fqn=fqn, policy=policy)
