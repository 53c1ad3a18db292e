"""Exported folders against transformers: what it loads, what it would have written itself, and what is refused."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path

import hf_micro as micro
import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from quaver.assembly import quantize_modules
from quaver.checkpoint.hf_export import export_hf
from quaver.checkpoint.hf_import import HFSource
from quaver.checkpoint.hf_load import load_into
from quaver.checkpoint.hf_tokenizer import byte_tokenizer_definition
from quaver.config import LowPrecisionConfig, load_config
from quaver.errors import CheckpointError, ConfigError
from quaver.models import build_on_meta, from_hf_config

IDS = torch.arange(64).reshape(2, 32) * 4 % 260


def load(folder: Path, dtype: torch.dtype = torch.float32):
    net, info = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    assert not any(info.values()), info
    return net.eval()


def test_transformers_computes_our_logits_from_both_layouts(tmp_path: Path) -> None:
    net = micro.model()
    ours = net(IDS).logits
    for experts in ("per_expert", "fused"):
        out = tmp_path / experts
        export_hf(net.state_dict().items(), net.config, None, out, dtype=torch.float32, experts=experts)
        theirs = load(out)
        assert (theirs(IDS).logits - ours).abs().max() <= 1e-6
        micro.assert_same(micro.state(theirs), micro.state(net))


def test_the_per_expert_file_is_the_one_that_transformers_writes(tmp_path: Path) -> None:
    net = micro.model()
    net.save_pretrained(tmp_path / "theirs")
    report = export_hf(net.state_dict().items(), net.config, None, tmp_path / "ours", dtype=torch.float32)
    ours = micro.read(tmp_path / "ours")
    micro.assert_same(ours, micro.read(tmp_path / "theirs"))
    micro.assert_same(ours, micro.per_expert(micro.state(net)))
    assert report.weight_map == dict.fromkeys(report.weight_map, "model.safetensors")
    assert report.weight_map.keys() == ours.keys()
    assert report.dropped == {}


def test_bf16_rounds_once_and_routers_stay_fp32(tmp_path: Path) -> None:
    net = micro.model()
    report = export_hf(net.state_dict().items(), net.config, None, tmp_path / "out", experts="fused")
    got = micro.read(tmp_path / "out")
    routers = {
        f"model.layers.{i}.mlp.gate.{name}" for i in (1, 2) for name in ("weight", "e_score_correction_bias")
    }
    assert set(report.kept_fp32) == routers
    want = {k: v if k in routers else v.bfloat16() for k, v in net.state_dict().items()}
    micro.assert_same(got, want)
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "bfloat16"
    micro.assert_same(micro.state(load(tmp_path / "out", torch.bfloat16)), want)


def test_a_quantised_model_exports_its_masters(tmp_path: Path) -> None:
    net = micro.model()
    want = micro.per_expert(micro.state(net))
    rules = load_config({"plan_overrides": micro.RULES}).plan_overrides
    quantize_modules(net, LowPrecisionConfig(enabled=True), plan=rules)
    for source in (net.state_dict(), net.state_dict(keep_vars=True)):
        out = tmp_path / f"out-{len(list(tmp_path.iterdir()))}"
        export_hf(source.items(), net.config, None, out, dtype=torch.float32)
        micro.assert_same(micro.read(out), want)


def test_many_shards_one_index(tmp_path: Path) -> None:
    net = micro.model()
    report = export_hf(
        iter(net.state_dict().items()), net.config, None, tmp_path / "out", max_shard_bytes=50_000
    )
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 3
    assert files == [f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)]
    assert index["weight_map"] == report.weight_map
    tensors = micro.read(tmp_path / "out")
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in tensors.values())
    assert tensors.keys() == report.weight_map.keys()
    for name in files:
        held = [tensors[k] for k, file in report.weight_map.items() if file == name]
        assert len(held) == 1 or sum(t.numel() * t.element_size() for t in held) <= 50_000
    assert sorted(report.files) == sorted(os.listdir(tmp_path / "out"))
    load(tmp_path / "out")


def test_the_config_tells_of_no_mtp_layer_and_of_the_run_s_tokenizer(tmp_path: Path) -> None:
    net = micro.model()
    assert net.config.num_nextn_predict_layers == 1  # transformers' own default
    assert (net.config.bos_token_id, net.config.eos_token_id) == (0, 1)
    report = export_hf(net.state_dict().items(), net.config, byte_tokenizer_definition(), tmp_path / "out")
    assert report.config_changes == {
        "num_nextn_predict_layers": [1, 0],
        "eos_token_id": [1, 256],
        "bos_token_id": [0, None],
    }
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert written["num_nextn_predict_layers"] == 0
    assert written["architectures"] == ["DeepseekV3ForCausalLM"]
    assert GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == 256
    assert net.config.num_nextn_predict_layers == 1  # the caller's config is left alone
    assert net.config.eos_token_id == 1


def test_a_config_that_knows_the_tokenizer_s_end_keeps_its_ids(tmp_path: Path) -> None:
    net = micro.model(eos_token_id=[7, 256], bos_token_id=3, pad_token_id=7)
    report = export_hf(net.state_dict().items(), net.config, byte_tokenizer_definition(), tmp_path / "out")
    assert report.config_changes.keys() == {"num_nextn_predict_layers"}


def test_without_a_tokenizer_its_absence_is_reported(tmp_path: Path) -> None:
    net = micro.model()
    report = export_hf(net.state_dict().items(), net.config, None, tmp_path / "out")
    assert report.not_written == {"tokenizer.json": "no tokenizer was given"}
    assert not (tmp_path / "out/tokenizer.json").exists()
    json.dumps(report.as_json())


def changed(tensors: dict[str, torch.Tensor], fault: str) -> list[tuple[str, torch.Tensor]]:
    name = "model.layers.1.mlp.gate.weight"
    items = dict(tensors)
    if fault == "missing":
        del items[name]
    elif fault == "extra":
        items["model.layers.1.mlp.gate.scale"] = torch.zeros(1)
    elif fault == "shape":
        items[name] = items[name][:-1]
    elif fault == "integer":
        items[name] = items[name].int()
    elif fault == "nan":
        items[name] = items[name].clone()
        items[name][0, 0] = float("nan")
    elif fault == "meta":
        items[name] = items[name].to("meta")
    return [*items.items(), *([(name, items[name])] if fault == "twice" else [])]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("missing", r"the model has model\.layers\.1\.mlp\.gate\.weight, which were not given"),
        ("extra", r"no such tensor\n.*model\.layers\.1\.mlp\.gate\.scale"),
        ("shape", r"shape \(3, 64\), wanted \(4, 64\)\n.*model\.layers\.1\.mlp\.gate\.weight"),
        (
            "integer",
            r"torch\.int32, wanted torch\.float32 or torch\.bfloat16\n.*layers\.1\.mlp\.gate\.weight",
        ),
        ("nan", r"not finite in torch\.float32\n.*model\.layers\.1\.mlp\.gate\.weight"),
        ("meta", r"on meta is no plain tensor\n.*model\.layers\.1\.mlp\.gate\.weight"),
        ("twice", r"given twice\n.*model\.layers\.1\.mlp\.gate\.weight"),
    ],
)
def test_faults_are_named_and_leave_nothing_behind(tmp_path: Path, fault: str, message: str) -> None:
    net = micro.model()
    with pytest.raises(CheckpointError, match=message):
        export_hf(
            changed(net.state_dict(), fault), net.config, None, tmp_path / "out", max_shard_bytes=10_000
        )
    assert list(tmp_path.iterdir()) == []


def test_a_value_that_bf16_cannot_hold_is_refused(tmp_path: Path) -> None:
    net = micro.model()
    with torch.no_grad():
        net.lm_head.weight[3, 5] = 3.4e38  # finite in FP32, infinite after rounding to BF16
    export_hf(net.state_dict().items(), net.config, None, tmp_path / "fp32", dtype=torch.float32)
    with pytest.raises(CheckpointError, match=r"not finite in torch\.bfloat16\n.*lm_head\.weight"):
        export_hf(net.state_dict().items(), net.config, None, tmp_path / "bf16")


def test_rotary_tables_are_dropped_with_a_reason(tmp_path: Path) -> None:
    net = micro.model()
    tensors = [*net.state_dict().items(), ("model.rotary_emb.inv_freq", torch.ones(8))]
    report = export_hf(tensors, net.config, None, tmp_path / "out")
    assert report.dropped == {"model.rotary_emb.inv_freq": "rotary frequencies are computed from the config"}


def test_an_mtp_layer_is_never_lost_on_the_way_out(tmp_path: Path) -> None:
    net = micro.model()
    tensors = [*net.state_dict().items(), ("model.layers.3.eh_proj.weight", torch.ones(8, 8))]
    with pytest.raises(CheckpointError, match=r"no such tensor\n.*model\.layers\.3\.eh_proj\.weight"):
        export_hf(tensors, net.config, None, tmp_path / "out")


@pytest.mark.parametrize("kind", ["folder", "file", "dangling link"])
def test_nothing_is_overwritten(tmp_path: Path, kind: str) -> None:
    out = tmp_path / "out"
    {"folder": out.mkdir, "file": out.touch, "dangling link": lambda: out.symlink_to("nowhere")}[kind]()
    net = micro.model()
    with pytest.raises(ConfigError, match="exists already"):
        export_hf(net.state_dict().items(), net.config, None, out)


def test_a_place_that_is_no_folder_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    net = micro.model()
    with pytest.raises(CheckpointError, match="the model could not be written: File exists"):
        export_hf(net.state_dict().items(), net.config, None, tmp_path / "file" / "out")


@pytest.mark.parametrize("limit", [100_000, 500])
def test_a_write_that_fails_half_way_leaves_nothing_behind(tmp_path: Path, limit: int) -> None:
    """A limit on the size of files stands in for a full disk: in a shard, and in its first bytes."""
    net = micro.model()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.raises(CheckpointError, match=r"the model could not be written: .*File too large"):
            export_hf(net.state_dict().items(), net.config, None, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


def test_files_follow_the_umask(tmp_path: Path) -> None:
    net = micro.model()
    before = os.umask(0o027)
    try:
        export_hf(net.state_dict().items(), net.config, byte_tokenizer_definition(), tmp_path / "out")
    finally:
        os.umask(before)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o750
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()}
    assert modes == {0o640}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": torch.float16}, "export in torch.float16"),
        ({"experts": "grouped"}, "experts 'grouped' is unknown"),
        ({"max_shard_bytes": 0}, "hold nothing"),
    ],
)
def test_arguments_are_checked(tmp_path: Path, arguments: dict, message: str) -> None:
    net = micro.model()
    with pytest.raises(ConfigError, match=message):
        export_hf(net.state_dict().items(), net.config, None, tmp_path / "out", **arguments)


def test_a_tokenizer_that_is_larger_than_the_vocabulary_is_refused(tmp_path: Path) -> None:
    net = micro.model(vocab_size=200)
    with pytest.raises(CheckpointError, match="260 ids, the model's vocabulary only 200"):
        export_hf(net.state_dict().items(), net.config, byte_tokenizer_definition(), tmp_path / "out")


QWEN3_MOE = {
    "vocab_size": 260, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 24,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "num_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": False,
}  # fmt: skip
LLAMA = {
    "vocab_size": 260, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": False,
}  # fmt: skip
GPT_OSS = {
    "vocab_size": 260, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 16,
    "num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip


@pytest.mark.parametrize(("model_type", "overrides"), [("qwen3_moe", QWEN3_MOE), ("llama", LLAMA)])
def test_other_architectures_as_transformers_writes_them(
    tmp_path: Path, model_type: str, overrides: dict
) -> None:
    net = from_hf_config(model_type, config_overrides=overrides, torch_dtype="float32")
    net.save_pretrained(tmp_path / "theirs")
    export_hf(net.state_dict().items(), net.config, None, tmp_path / "ours", dtype=torch.float32)
    micro.assert_same(micro.read(tmp_path / "ours"), micro.read(tmp_path / "theirs"))
    for folder in ("ours", "theirs"):
        again = build_on_meta(net.config)
        load_into(again, HFSource(tmp_path / folder))
        micro.assert_same(micro.state(again), micro.state(net))


def test_experts_that_lie_in_another_way_are_written_as_they_are_or_not_at_all(tmp_path: Path) -> None:
    """gpt-oss interleaves gate and up, and transposes."""
    net = from_hf_config(
        "gpt_oss", config_overrides=GPT_OSS, torch_dtype="float32", attn_implementation="eager"
    )
    with pytest.raises(CheckpointError, match=r"in another way\n.*mlp\.experts\.(gate_up|down)_proj"):
        export_hf(net.state_dict().items(), net.config, None, tmp_path / "split")
    export_hf(
        net.state_dict().items(), net.config, None, tmp_path / "out", dtype=torch.float32, experts="fused"
    )
    micro.assert_same(micro.read(tmp_path / "out"), micro.state(net))


def test_tied_embeddings_are_refused(tmp_path: Path) -> None:
    net = from_hf_config("llama", config_overrides=LLAMA | {"tie_word_embeddings": True})
    with pytest.raises(ConfigError, match="not supported: export of tied embeddings"):
        export_hf(net.state_dict().items(), net.config, None, tmp_path / "out")
