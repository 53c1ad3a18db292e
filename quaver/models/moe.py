"""MoE layers seen in one way only: what is one, and whether its router can choose.

`iter_moe_layers` is the one place that decides what an MoE layer is; the router bias, statistics and reports go
through it. Imports torch and `quaver.errors`.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from quaver.errors import ConfigError

ROUTER_BIAS = "e_score_correction_bias"


def iter_moe_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """All MoE layers in the model's order: (FQN, module with the submodules `.gate` and `.experts`)."""
    return [
        (fqn, module)
        for fqn, module in model.named_modules()
        if isinstance(module._modules.get("gate"), nn.Module)
        and isinstance(module._modules.get("experts"), nn.Module)
    ]


def check_routing(config: Any) -> None:
    """Check that a config's router can choose: the same rules torch would only break on in the first forward.

    Args:
        config: any transformers config; one without experts passes.

    Raises:
        ConfigError: top-k above the number of experts, or expert groups that cannot be formed.
    """
    experts = getattr(config, "num_local_experts", None)
    top_k = getattr(config, "num_experts_per_tok", None)
    if not isinstance(experts, int) or not isinstance(top_k, int):
        return
    groups = getattr(config, "n_group", None) or 1
    chosen = getattr(config, "topk_group", None) or 1
    where = (
        f"model.config_overrides: num_experts_per_tok {top_k}, experts {experts}, "
        f"n_group {groups}, topk_group {chosen}"
    )
    if not 1 <= top_k <= experts:
        raise ConfigError("a token cannot choose more experts than there are", where=where)
    if experts % groups:
        raise ConfigError("the experts do not divide into the groups", where=where, remedy="set n_group: 1")
    if groups > 1 and experts // groups < 2:
        raise ConfigError(
            "a group needs two experts: groups are ranked by their best two",
            where=where,
            remedy="set n_group: 1",
        )
    if not 1 <= chosen <= groups or top_k > chosen * (experts // groups):
        raise ConfigError(
            "the chosen groups hold too few experts",
            where=where,
            remedy="raise topk_group (n_group: 1 and topk_group: 1 switch grouping off)",
        )
