"""Routed experts, forward and backward: low precision over BF16 and over torchao's emulated grouped GEMM.

Every expert gets the same number of tokens, so that no contestant pads. BF16 means what a BF16 run has: the
experts of transformers with grouped GEMMs. May import: policies, operators, models, low_precision.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn
from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Experts

from quaver.bench import torchao_peer
from quaver.bench.comparison import Comparison, Group, turns
from quaver.bench.operators import drawn
from quaver.bench.policies import LABELS, policy
from quaver.bench.sizes import Sizes
from quaver.bench.timing import Contestant
from quaver.low_precision import quantize_weights, refresh
from quaver.models import DeepseekV3LowPrecisionExperts
from quaver.models.build import EXPERTS_IMPLEMENTATION


def even_routing(tokens: int, experts: int, top_k: int) -> torch.Tensor:
    """int64 [tokens, top_k]: different experts for each token, and equally many tokens for each expert."""
    stride = max(1, experts // top_k)
    first = torch.arange(tokens) % experts
    index = (first[:, None] + torch.arange(top_k) * stride) % experts
    return index[torch.randperm(tokens, generator=torch.Generator().manual_seed(3))]


def source_experts(sizes: Sizes, dtype: torch.dtype) -> DeepseekV3Experts:
    """transformers' experts as our BF16 runs have them."""
    config = DeepseekV3Config(
        hidden_size=sizes.hidden,
        moe_intermediate_size=sizes.inner,
        n_routed_experts=sizes.experts,
        num_experts_per_tok=sizes.top_k,
    )
    config._experts_implementation = EXPERTS_IMPLEMENTATION
    experts = DeepseekV3Experts(config)
    with torch.no_grad():
        for number, parameter in enumerate(experts.parameters()):
            parameter.copy_(drawn(*parameter.shape, scale=0.02, seed=number).bfloat16())
    return experts.to(dtype)


@contextmanager
def expert_contestants(sizes: Sizes, needed: frozenset[str]) -> Iterator[Mapping[str, Contestant]]:
    """Gradients of inputs, routing weights and both weights; low-precision ones with their refresh."""
    x = drawn(sizes.tokens, sizes.hidden, seed=7).bfloat16().requires_grad_()
    toward = drawn(sizes.tokens, sizes.hidden, scale=1e-3, seed=8).bfloat16()
    index = even_routing(sizes.tokens, sizes.experts, sizes.top_k)
    weight = torch.softmax(drawn(sizes.tokens, sizes.top_k, seed=9), -1).bfloat16().requires_grad_()

    def step(module: nn.Module) -> None:
        wanted = (x, weight, module.get_parameter("gate_up_proj"), module.get_parameter("down_proj"))
        torch.autograd.grad(module(x, index, weight), wanted, toward)

    def refreshed_step(module: nn.Module) -> None:
        refresh(module)
        step(module)

    contestants: dict[str, Contestant] = {}
    if "bf16" in needed:
        plain = source_experts(sizes, torch.bfloat16)
        contestants["bf16"] = partial(step, plain)
    for fmt in {"mxfp8", "hif8"} & needed:
        source = source_experts(sizes, torch.float32)
        made = DeepseekV3LowPrecisionExperts.from_experts(source, fqn="experts", policy=policy(fmt))
        quantize_weights(made)
        contestants[fmt] = partial(refreshed_step, made)
    if "torchao" in needed:
        source = source_experts(sizes, torch.float32)
        peer = torchao_peer.Experts(source.gate_up_proj.detach(), source.down_proj.detach())
        contestants["torchao"] = partial(step, peer)
    yield contestants


def experts_group() -> Group:
    """Over BF16."""
    rows = [
        Comparison(
            f"experts.{fmt}.over_bf16",
            fmt,
            "bf16",
            target,
            f"{LABELS[fmt]} experts, forward and backward with their refresh, over our BF16 experts",
        )
        for fmt, target in (("mxfp8", 1.12), ("hif8", None))
    ]
    return Group("experts", tuple(rows), turns(expert_contestants))


def experts_peer_group() -> Group:
    """Over torchao's emulation, in turns of its own as the dense layer is."""
    row = Comparison(
        "experts.mxfp8.over_torchao",
        "mxfp8",
        "torchao",
        0.25,
        "MXFP8 experts, forward and backward, over torchao's emulated grouped GEMM (FLOOR)",
    )
    return Group("experts, peers", (row,), turns(expert_contestants), peers={"torchao": torchao_peer.PACKAGE})
