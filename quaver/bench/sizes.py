"""The sizes of everything that is timed; tests take small ones. May import: nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

# DeepSeek-V3 with 33.5 million parameters: latent attention whose Q and K heads are wider than its V heads, one
# dense layer, three with 16 experts of which a token takes four.
MODEL: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 4,
    "first_k_dense_replace": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "q_lora_rank": None,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "num_experts_per_tok": 4,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "max_position_embeddings": 512,
    "initializer_range": 0.006,
    "use_cache": False,
}


@dataclass(frozen=True)
class Sizes:
    """What the contestants are built with.

    Args:
        tokens: rows of a layer's input, and tokens of a step.
        linear: inputs and outputs of the dense layer.
        experts: number of experts, of which a token takes `top_k`.
        hidden, inner: of an expert.
        model: config of the model of a whole step.
        batch, seq_len: sequences of a step and their length.
    """

    tokens: int = 2048
    linear: tuple[int, int] = (2048, 2816)
    experts: int = 16
    top_k: int = 4
    hidden: int = 512
    inner: int = 256
    model: dict[str, Any] = field(default_factory=lambda: dict(MODEL))
    batch: int = 4
    seq_len: int = 512


FULL = Sizes()
