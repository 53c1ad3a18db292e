"""Routed experts, forward and backward: low precision over BF16 and over torchao's emulated grouped GEMM.

Every expert gets a multiple of 32 tokens, so that no contestant pads: the same number of them, which lets GEMMs be
batched, or different ones. BF16 means what a BF16 run has: the
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

UNEVEN = ", uneven"  # behind the name of a contestant whose experts have different numbers of tokens


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


def uneven_routing(tokens: int, experts: int, top_k: int) -> torch.Tensor:
    """int64 [tokens, top_k]: different experts for each token; no expert has as many tokens as its neighbour.

    Each expert has a multiple of 32 of them.

    Raises:
        ValueError: no such routing is made of these sizes.
    """
    sizes = f"{tokens} tokens, {experts} experts, {top_k} a token"
    even, left = divmod(tokens * top_k, experts)
    if left or even % 32 or even < 64:
        raise ValueError(f"uneven routing takes a mean of 64, 96, ... tokens an expert, not {sizes}")
    counts = [even] * experts
    for pair in range(experts // 2):
        moved = min(32 * (1 + pair % 4), even // 2 // 32 * 32)
        counts[2 * pair] += moved
        counts[2 * pair + 1] -= moved
    if max(counts) > tokens:
        raise ValueError(f"uneven routing would give an expert {max(counts)} tokens: {sizes}")
    dealt = torch.repeat_interleave(torch.arange(experts), torch.tensor(counts))
    # dealt in rounds, one expert to each token: the choices of a token lie `tokens` apart, and no expert is so long
    index = dealt.view(top_k, tokens).t()
    return index[torch.randperm(tokens, generator=torch.Generator().manual_seed(3))]


@contextmanager
def expert_contestants(sizes: Sizes, needed: frozenset[str]) -> Iterator[Mapping[str, Contestant]]:
    """Gradients of inputs, routing weights and both weights; low-precision ones with their refresh."""
    x = drawn(sizes.tokens, sizes.hidden, seed=7).bfloat16().requires_grad_()
    toward = drawn(sizes.tokens, sizes.hidden, scale=1e-3, seed=8).bfloat16()
    weight = torch.softmax(drawn(sizes.tokens, sizes.top_k, seed=9), -1).bfloat16().requires_grad_()

    def step(module: nn.Module, index: torch.Tensor) -> None:
        wanted = (x, weight, module.get_parameter("gate_up_proj"), module.get_parameter("down_proj"))
        torch.autograd.grad(module(x, index, weight), wanted, toward)

    def refreshed_step(module: nn.Module, index: torch.Tensor) -> None:
        refresh(module)
        step(module, index)

    contestants: dict[str, Contestant] = {}
    for suffix, routing in (("", even_routing), (UNEVEN, uneven_routing)):
        if not any(name.endswith(UNEVEN) == bool(suffix) for name in needed):
            continue  # sizes that do not fit one of the two are no hindrance to the other
        index = routing(sizes.tokens, sizes.experts, sizes.top_k)
        if f"bf16{suffix}" in needed:
            plain = source_experts(sizes, torch.bfloat16)
            contestants[f"bf16{suffix}"] = partial(step, plain, index)
        for fmt in ("mxfp8", "hif8"):
            if f"{fmt}{suffix}" in needed:
                source = source_experts(sizes, torch.float32)
                made = DeepseekV3LowPrecisionExperts.from_experts(source, fqn="experts", policy=policy(fmt))
                quantize_weights(made)
                contestants[f"{fmt}{suffix}"] = partial(refreshed_step, made, index)
        if f"torchao{suffix}" in needed:
            source = source_experts(sizes, torch.float32)
            peer = torchao_peer.Experts(source.gate_up_proj.detach(), source.down_proj.detach())
            contestants[f"torchao{suffix}"] = partial(step, peer, index)
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
    what = "MXFP8 experts over our BF16 experts, where no two neighbours have equally many tokens"
    rows.append(Comparison("experts.mxfp8.over_bf16_uneven", f"mxfp8{UNEVEN}", f"bf16{UNEVEN}", None, what))
    return Group("experts", tuple(rows), turns(expert_contestants))


def experts_peer_group() -> Group:
    """Over torchao's emulation, in turns of its own as the dense layer is."""
    what = "MXFP8 experts, forward and backward, over torchao's emulated grouped GEMM (FLOOR)"
    even = Comparison("experts.mxfp8.over_torchao", "mxfp8", "torchao", 0.25, what)
    what = "The same, where no two neighbours have equally many tokens"
    uneven = Comparison(
        "experts.mxfp8.over_torchao_uneven", f"mxfp8{UNEVEN}", f"torchao{UNEVEN}", None, what
    )
    peers = dict.fromkeys(("torchao", f"torchao{UNEVEN}"), torchao_peer.PEER)
    return Group("experts, peers", (even, uneven), turns(expert_contestants), peers=peers)
