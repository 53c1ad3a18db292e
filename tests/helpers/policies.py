"""Recipes, and the smallest modules that use them."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn

from quaver.backends import Backend, ReferenceBackend
from quaver.config import LowPrecisionConfig
from quaver.low_precision import (
    LowPrecisionLinear,
    LowPrecisionPolicy,
    policy_for,
    quantize_weights,
    replace_low_precision_linear,
)

FLOOR, RCEIL, HIF8 = "mxfp8_e4m3/mx_block/floor@1", "mxfp8_e4m3/mx_block/rceil@1", "hif8/current@1"
RECIPES = [FLOOR, RCEIL, HIF8]
FORMATS = [FLOOR, HIF8]  # one recipe a format, where the scale rule cannot matter


def policy(recipe: str, backend: Backend | None = None) -> LowPrecisionPolicy:
    """A policy of one recipe id, on a backend and a ledger of its own."""
    if recipe == HIF8:
        config = LowPrecisionConfig(enabled=True, format="hif8", scaling="current")
    else:
        config = LowPrecisionConfig(enabled=True, scale_rule=recipe.split("/")[2].removesuffix("@1"))
    bound = policy_for(config, backend if backend is not None else ReferenceBackend())
    assert bound.recipe.id == recipe
    return bound


def linear(
    recipe: str | LowPrecisionPolicy,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    fqn: str = "block.proj",
    requires_grad: bool = True,
) -> LowPrecisionLinear:
    """A quantised Linear over a given FP32 master [N, K]."""
    source = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    source.weight = nn.Parameter(weight.clone(), requires_grad=requires_grad)
    if bias is not None:
        source.bias = nn.Parameter(bias.clone())
    bound = policy(recipe) if isinstance(recipe, str) else recipe
    module = replace_low_precision_linear(source, fqn=fqn, policy=bound)
    quantize_weights(module)
    return module


def mlp(bound: LowPrecisionPolicy, *, seed: int = 0, widths: tuple[int, ...] = (64, 96, 64)) -> nn.Sequential:
    """Linears with SiLU between them, every one in low precision, biased."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for index, (k, n) in enumerate(pairwise(widths)):
        layers += [replace_low_precision_linear(nn.Linear(k, n), fqn=str(2 * index), policy=bound), nn.SiLU()]
    model = nn.Sequential(*layers[:-1])
    quantize_weights(model)
    return model
