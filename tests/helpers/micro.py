"""A micro DeepSeek-V3 run that takes a fraction of a second a step, on text that every Python has."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

MLA = [f"model.layers.*.self_attn.{p}" for p in ("q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")]
RULES = [
    {
        "match": [*MLA, "model.layers.0.mlp.*_proj", "model.layers.*.mlp.shared_experts.*_proj"],
        "module_type": "torch.nn.Linear",
        "replace_module": "low_precision_linear",
    },
    {
        "match": "model.layers.*.mlp.experts",
        "module_type": "transformers.models.deepseek_v3.modeling_deepseek_v3.DeepseekV3Experts",
        "replace_module": "deepseek_v3_low_precision_experts",
    },
]
MODEL = {
    "vocab_size": 260,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 48,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "max_position_embeddings": 64,
    "use_cache": False,
}
FORMATS = {
    "bf16": {"enabled": False},
    "mxfp8": {"enabled": True, "format": "mxfp8_e4m3", "scaling": "mx_block"},
    "hif8": {"enabled": True, "format": "hif8", "scaling": "current"},
}


def write_corpus(folder: Path) -> Path:
    """Some of the standard library's sources as .txt files."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    for package in ("json", "email"):
        for file in sorted((stdlib / package).glob("*.py")):
            text = file.read_text(encoding="utf-8")
            (folder / f"{package}_{file.stem}.txt").write_text(text, encoding="utf-8")
    return folder


def micro_document(fmt: str, corpus: str, cache: str) -> dict[str, Any]:
    """The config of a micro run as a mapping."""
    return {
        "name": f"micro-{fmt}",
        "seed": 7,
        "model": {"config_name_or_path": "deepseek_v3", "config_overrides": dict(MODEL)},
        "low_precision": FORMATS[fmt],
        "plan_overrides": RULES,
        "data": {
            "sources": [{"path": corpus}],
            "seq_len": 32,
            "cache_dir": cache,
            "validation_fraction": 0.1,
        },
        "training": {
            "steps": 4,
            "micro_batch_size": 2,
            "validate_every": 0,
            "validation_batches": 2,
            "sample_tokens": 0,
            "num_threads": 1,
        },
        "optimizer": {"lr": 3e-3, "schedule": {"kind": "constant"}},
    }
