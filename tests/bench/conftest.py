"""Sizes so small that everything that is timed runs in a moment."""

import pytest

from quaver.bench.sizes import MODEL, Sizes


@pytest.fixture
def small() -> Sizes:
    model = {
        **MODEL,
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 64,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "n_routed_experts": 4,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 64,
    }
    return Sizes(
        tokens=128,
        linear=(64, 96),
        experts=4,
        top_k=2,
        hidden=64,
        inner=32,
        model=model,
        batch=2,
        seq_len=32,
    )
