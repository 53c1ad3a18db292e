"""`quaver plan`: the 16B model on a small machine, and what a changed config does to a plan.

The counts of the 16B model are those of its published table, written out here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]
Tiny = Callable[..., Path]

CONFIGS = Path(__file__).parents[2] / "configs" / "dsv3-16b"
BY_CATEGORY = {
    "embedding": 209_715_200,
    "lm_head": 209_715_200,
    "mla": 678_952_960,
    "dense_mlp": 67_239_936,
    "shared_experts": 467_140_608,
    "routed_experts": 14_948_499_456,
    "router": 3_538_944,
    "norms": 202_752,
    "other": 0,
}
LAYERS, MOE_LAYERS = range(28), range(1, 28)
DENSE = [
    *(f"model.layers.{i}.self_attn.{name}" for i in LAYERS
      for name in ("q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")),
    *(f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up", "down")),
    *(f"model.layers.{i}.mlp.shared_experts.{name}_proj" for i in MOE_LAYERS for name in ("gate", "up", "down")),
]  # fmt: skip
EXPERTS = [f"model.layers.{i}.mlp.experts" for i in MOE_LAYERS]


def hits_of(document: dict[str, Any]) -> list[str]:
    return sorted(fqn for entry in document["replacements"] for fqn in entry["hits"])


def test_the_16b_model_within_60_s_and_2_gib() -> None:
    began = time.monotonic()
    command = [sys.executable, "-m", "quaver", "plan", str(CONFIGS / "mxfp8.yaml"), "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    out, err = process.stdout.read(), process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)  # this child's own peak, not that of all children
    process.returncode = os.waitstatus_to_exitcode(status)
    assert (process.returncode, err) == (0, "")
    assert time.monotonic() - began < 60
    assert usage.ru_maxrss < 2 * 2**20  # KiB
    document = json.loads(out)
    assert document["parameters"] == {"total": 16_585_005_056, "by_category": BY_CATEGORY}
    assert document["low_precision_parameters"] == 16_161_832_960
    assert (len(DENSE), len(EXPERTS)) == (196, 27)
    assert hits_of(document) == sorted(DENSE + EXPERTS)
    assert document["recipe"] == "mxfp8_e4m3/mx_block/floor@1"
    assert (document["spec"], document["world_size"]) == ("deepseek_v3_16b", 8)
    assert (document["memory_per_rank"], document["communication"], document["flops"]) == ({}, [], {})
    # 8 ranks: kv_a has 3136 / 8 = 392 rows each and layer 0's gate and up 10944 / 8 = 1368, which cut blocks
    # of 32; the shared experts' 2816 / 8 = 352 do not
    exact = {
        shard["fqn"]: shard["rows_per_rank"] for shard in document["shards"] if shard["verdict"] == "exact"
    }
    assert exact == {
        **{f"model.layers.{i}.self_attn.kv_a_proj_with_mqa.weight": 392 for i in LAYERS},
        "model.layers.0.mlp.gate_proj.weight": 1368,
        "model.layers.0.mlp.up_proj.weight": 1368,
    }
    assert {shard["verdict"] for shard in document["shards"]} == {"aligned", "exact"}
    assert len(document["shards"]) == 196 + 2 * 27


def test_the_other_16b_configs(quaver: Run) -> None:
    hif8 = quaver("plan", CONFIGS / "hif8.yaml", "--json")
    bf16 = quaver("plan", CONFIGS / "bf16.yaml", "--json")
    assert (hif8.code, bf16.code) == (0, 0)
    documents = [json.loads(hif8.out), json.loads(bf16.out)]
    for document in documents:
        assert document["parameters"] == {"total": 16_585_005_056, "by_category": BY_CATEGORY}
    assert hits_of(documents[0]) == sorted(DENSE + EXPERTS)
    assert documents[0]["recipe"] == "hif8/current@1"
    assert (documents[1]["recipe"], documents[1]["low_precision_parameters"]) == (None, 0)
    assert (documents[1]["replacements"], documents[1]["shards"]) == ([], [])


def test_a_changed_override_fails_the_specification_by_name(quaver: Run) -> None:
    ended = quaver("plan", CONFIGS / "mxfp8.yaml", "model.config_overrides.kv_lora_rank=512", "--json")
    assert (ended.code, ended.out) == (2, "")
    assert "kv_lora_rank is 512, the specification has 3072" in ended.err
    assert "Traceback" not in ended.err


def test_q_lora_rank_moves_the_hits_to_q_a_and_q_b(quaver: Run) -> None:
    """The published YAML for q_lora_rank lists the two in place of q_proj; the old list is an error."""
    changes = ["model.spec=null", "model.config_overrides.q_lora_rank=1536"]
    stale = quaver("plan", CONFIGS / "mxfp8.yaml", *changes)
    assert (stale.code, stale.out) == (2, "")
    assert "a pattern matches no module" in stale.err
    assert "model.layers.*.self_attn.q_proj" in stale.err
    names = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
    patterns = json.dumps([f"model.layers.*.self_attn.{name}" for name in names])
    ended = quaver("plan", CONFIGS / "mxfp8.yaml", *changes, f"plan_overrides.0.match={patterns}", "--json")
    assert ended.code == 0, ended.err
    hits = {entry["pattern"]: entry["hits"] for entry in json.loads(ended.out)["replacements"]}
    for name in ("q_a_proj", "q_b_proj"):
        wanted = [f"model.layers.{i}.self_attn.{name}" for i in LAYERS]
        assert hits[f"model.layers.*.self_attn.{name}"] == wanted


def test_strict_tiles_print_everything_and_then_exit_with_2(quaver: Run) -> None:
    """Under multiples of 64 a rank the published model is illegal in three groups: 28 + 2 + 54 weights."""
    ended = quaver("plan", CONFIGS / "mxfp8.yaml", "fsdp_config.strict_scale_tiles=true", "--json")
    assert ended.code == 2
    document = json.loads(ended.out)
    illegal = [shard for shard in document["shards"] if shard["verdict"] == "illegal"]
    assert len(illegal) == 28 + 2 + 54
    assert {shard["rows_per_rank"] for shard in illegal} == {392, 1368, 352}
    assert "84 weights cannot be sharded over 8 ranks" in ended.err
    assert "model.layers.0.self_attn.kv_a_proj_with_mqa.weight [3136, 2048]" in ended.err


def test_ranks(quaver: Run, tiny: Tiny) -> None:
    """--world-size, else dp_shard_size, else 1; what dp_shard_size does not divide is an error."""
    worlds = []
    for arguments in (
        (),
        ("fsdp_config.dp_shard_size=2",),
        ("fsdp_config.dp_shard_size=2", "--world-size", "4"),
    ):
        document = json.loads(quaver("plan", tiny(), *arguments, "--json").out)
        worlds.append((document["world_size"], document["shard_size"]))
    assert worlds == [(1, 1), (2, 2), (4, 2)]
    ended = quaver("plan", tiny(), "fsdp_config.dp_shard_size=2", "--world-size", "3")
    assert (ended.code, ended.out) == (2, "")
    assert "dp_shard_size 2 does not divide the number of ranks 3" in ended.err


def test_the_human_plan(quaver: Run) -> None:
    ended = quaver(
        "plan", CONFIGS / "mxfp8.yaml", 'model.freeze=["model.embed_tokens.*"]', "--world-size", "16"
    )
    assert (ended.code, ended.err) == (0, "")
    lines = [" ".join(line.strip("│├└─ ").split()) for line in ended.out.splitlines()]
    for line in (
        "layers.{1-27} DeepseekV3DecoderLayer MoE, 64 experts, top-6 27 x 595,336,192 = 16,074,077,184",
        "embed_tokens Embedding [102400, 2048] frozen",
        "routed_experts 14,948,499,456 90.13%",
        "total 16,585,005,056 100.00%",
        "in low precision 16,161,832,960 97.45%",
        "model.layers.*.self_attn.q_proj 28 model.layers.{0-27}.self_attn.q_proj",
        "model.embed_tokens.* 1 model.embed_tokens.weight",
        "shards over 8 ranks, 2 replicas",
        "model.layers.{0-27}.self_attn.kv_a_proj_with_mqa.weight 28 [3136, 2048] 392 rows exact "
        "392 rows a rank cut a block of 32",
        "model.layers.{1-27}.mlp.experts.down_proj 27 [64, 2048, 1408] 8 experts aligned",
    ):
        assert line in lines
    assert "\x1b" not in ended.out


def test_the_human_plan_of_bf16(quaver: Run, tiny: Tiny) -> None:
    ended = quaver("plan", tiny(), "low_precision.enabled=false")
    assert (ended.code, ended.err) == (0, "")
    assert "low precision is off: nothing is replaced" in ended.out
    assert "shards" not in ended.out


def test_no_data_is_read_and_no_group_started(
    quaver: Run, tiny: Tiny, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import torch.distributed as dist

    def forbidden(*args: Any, **options: Any) -> Any:
        raise AssertionError("a plan starts no process group")

    monkeypatch.setattr(dist, "init_process_group", forbidden)
    ended = quaver("plan", tiny(**{"data.sources": [{"path": "/nowhere"}]}))
    assert ended.code == 0, ended.err
    assert not (tmp_path / "cache").exists()


def test_help_is_wrapped_by_the_terminal_alone(quaver: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    out = quaver("plan", "--help").out
    assert "and whether each low-precision weight can be sharded over the ranks" in out


def test_one_row_and_one_expert_are_singular(quaver: Run, tiny: Tiny) -> None:
    out = quaver("plan", tiny(), "--world-size", "4").out
    assert "1 expert " in out
    assert "1 experts" not in out
    assert "16 rows" in out
