"""The GEMM floor of a step: its matrix products in BF16 and nothing else, each with weights of its own.

Every linear layer, router and expert has three products (fprop, dgrad, wgrad) of the shapes that a step has;
experts get equally many tokens; attention has two products forward and four backward for each block of queries, with
the keys that its queries may see, as our attention has: the keys behind are multiplied by nobody. No product waits
for another, nothing is added, activated, summed or updated. May import: models.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from quaver.bench.operators import drawn
from quaver.bench.sizes import Sizes
from quaver.bench.timing import Contestant
from quaver.models import build_on_meta, iter_moe_layers, load_hf_config
from quaver.models.causal_blocks import BLOCK

Product = Callable[[], object]


def bare_gemms(sizes: Sizes) -> Contestant:
    """All products of one step."""
    products = list(_products(sizes))

    def run() -> None:
        for product in products:
            product()

    return run


def _products(sizes: Sizes) -> list[Product]:
    model = build_on_meta(load_hf_config("deepseek_v3", sizes.model))
    tokens = sizes.batch * sizes.seq_len
    found: list[Product] = []
    for module in model.modules():
        if isinstance(module, nn.Linear):
            found += _layer(tokens, module.out_features, module.in_features)
    for _, moe in iter_moe_layers(model):
        gate = moe.get_submodule("gate").get_parameter("weight")
        found += _layer(tokens, *gate.shape)
        experts = moe.get_submodule("experts")
        rows = tokens * sizes.model["num_experts_per_tok"] // sizes.model["n_routed_experts"]
        for name in ("gate_up_proj", "down_proj"):
            count, outputs, inputs = experts.get_parameter(name).shape
            for _ in range(count):
                found += _layer(rows, outputs, inputs)
    for _ in range(sizes.model["num_hidden_layers"]):
        found += attention_products(sizes)
    return found


def _layer(tokens: int, outputs: int, inputs: int) -> list[Product]:
    """y = x w', dx = g w, dw = g' x."""
    x, g, w = (_matrix(*shape) for shape in ((tokens, inputs), (tokens, outputs), (outputs, inputs)))
    return [lambda: torch.mm(x, w.t()), lambda: torch.mm(g, w), lambda: torch.mm(g.t(), x)]


def attention_products(sizes: Sizes) -> list[Product]:
    """Of all blocks of one layer."""
    model, T = sizes.model, sizes.seq_len
    heads = sizes.batch * model["num_attention_heads"]
    width = model["qk_nope_head_dim"] + model["qk_rope_head_dim"]
    q, k = _matrix(heads, T, width), _matrix(heads, T, width)
    v, g = _matrix(heads, T, model["v_head_dim"]), _matrix(heads, T, model["v_head_dim"])
    found: list[Product] = []
    for start in range(0, T, BLOCK):
        end = min(T, start + BLOCK)
        found += _block(q[:, start:end], k[:, :end], v[:, :end], g[:, start:end])
    return found


def _block(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor) -> list[Product]:
    """Scores and outputs forward; gradients of probabilities, V, Q and K backward."""
    scores = _matrix(len(q), q.shape[1], k.shape[1])
    return [
        lambda: torch.bmm(q, k.transpose(1, 2)),
        lambda: torch.bmm(scores, v),
        lambda: torch.bmm(g, v.transpose(1, 2)),
        lambda: torch.bmm(scores.transpose(1, 2), g),
        lambda: torch.bmm(scores, k),
        lambda: torch.bmm(scores.transpose(1, 2), q),
    ]


def _matrix(*shape: int) -> torch.Tensor:
    return drawn(*shape).bfloat16()
