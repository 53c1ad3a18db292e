"""A tiny run and the command line in this process: torch and transformers are imported once, not per test."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

ATTENTION = ["q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
TINY: dict[str, Any] = {
    "name": "tiny",
    "model": {
        "config_name_or_path": "deepseek_v3",
        "config_overrides": {
            "vocab_size": 288, "hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 32,
            "num_hidden_layers": 2, "first_k_dense_replace": 1, "num_attention_heads": 2,
            "num_key_value_heads": 2, "n_routed_experts": 4, "n_shared_experts": 1, "q_lora_rank": None,
            "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16,
            "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "max_position_embeddings": 64,
        },
    },
    "low_precision": {"enabled": True},
    "plan_overrides": [
        {
            "match": [f"model.layers.*.self_attn.{name}" for name in ATTENTION],
            "module_type": "torch.nn.Linear",
            "replace_module": "low_precision_linear",
        },
        {
            "match": "model.layers.*.mlp.experts",
            "module_type": "transformers.models.deepseek_v3.modeling_deepseek_v3.DeepseekV3Experts",
            "replace_module": "deepseek_v3_low_precision_experts",
        },
    ],
    "data": {"seq_len": 16, "validation_fraction": 0.3},
    "training": {
        "steps": 12, "micro_batch_size": 1, "validate_every": 6, "validation_batches": 1,
        "sample_prompts": ["[red]def[/red] "], "sample_tokens": 4,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Ended:
    """How a command ended, and what it wrote."""

    code: int
    out: str
    err: str


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder as the current one, with a token cache of its own; no colours, no launcher."""
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("QUAVER_CACHE", str(tmp_path / "cache"))
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return folder


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Twelve short documents."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number in range(12):
        (folder / f"{number:02}.txt").write_text(f"Document {number}.\n" + "all work and no play\n" * 3)
    return folder


@pytest.fixture
def tiny(tmp_path: Path, home: Path, corpus: Path) -> Callable[..., Path]:
    """tiny(**{"a.b": value}): a YAML file of the tiny run with changes; `...` as a value removes the key."""

    def write(**changes: Any) -> Path:
        document = copy.deepcopy(TINY)
        document["data"]["sources"] = [{"path": str(corpus)}]
        for path, value in changes.items():
            here = document
            *above, last = path.split(".")
            for key in above:
                here = here[key]
            if value is ...:
                del here[last]
            else:
                here[last] = value
        file = tmp_path / "tiny.yaml"
        file.write_text(yaml.safe_dump(document), encoding="utf-8")
        return file

    return write


@pytest.fixture
def quaver(
    home: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Ended]:
    """quaver("train", file, ...): runs the command in this process, its streams caught at the descriptors."""
    from quaver.backends.native import compiler
    from quaver.cli.main import main

    monkeypatch.setattr(compiler, "PATIENCE", 600.0)  # a busy machine's slow compiler is no line on stderr

    def run(*arguments: object) -> Ended:
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        streams = capfd.readouterr()
        code = ended.value.code
        return Ended(code if isinstance(code, int) else 0, streams.out, streams.err)

    return run
