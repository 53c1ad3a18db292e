"""Folders into models: both layouts, every dtype, unit by unit, into sharded and quantised models."""

from __future__ import annotations

import hashlib
import weakref
from pathlib import Path

import hf_micro as micro
import pytest
import torch
from safetensors.torch import load_file

from quaver.assembly import Assembly, plan_on_meta, quantize_modules
from quaver.checkpoint.hf_export import export_hf
from quaver.checkpoint.hf_import import HFSource
from quaver.checkpoint.hf_load import check_source, load_into, load_unit, wanted_shapes
from quaver.config import LowPrecisionConfig, load_config
from quaver.distributed import init_world, is_sharded, shard_mesh
from quaver.errors import CheckpointError, PlanError
from quaver.low_precision import quantised_weights
from quaver.models import build_on_meta, init_units

CPU = torch.device("cpu")
IDS = torch.arange(64).reshape(2, 32) * 4 % 260


def folders(tmp_path: Path) -> tuple[dict[str, torch.Tensor], Path, Path]:
    """A model's tensors, and the same in a fused and in a per-expert file."""
    tensors = micro.state(micro.model())
    fused = micro.write(tmp_path / "fused", tensors)
    return tensors, fused, micro.write(tmp_path / "per_expert", micro.per_expert(tensors))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fused_and_per_expert_files_give_equal_models(tmp_path: Path, dtype: str) -> None:
    """Whatever the model was built in, the values are the file's, in FP32."""
    tensors, *both = folders(tmp_path)
    for folder in both:
        net = build_on_meta(micro.config(), dtype)
        report = load_into(net, HFSource(folder))
        micro.assert_same(micro.state(net), tensors)
        assert report.loaded.keys() == tensors.keys()
        assert len(report.loaded[micro.FUSED]) == (1 if folder.name == "fused" else 2 * micro.EXPERTS)
        assert report.dropped == {}
        assert torch.equal(net.eval()(IDS).logits, micro.model()(IDS).logits)  # rotary tables are there too


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_upcast_exactly(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {fqn: tensor.to(dtype) for fqn, tensor in micro.state(micro.model()).items()}
    for number, layout in enumerate((tensors, micro.per_expert(tensors))):
        net = build_on_meta(micro.config())
        load_into(net, HFSource(micro.write(tmp_path / str(number), layout)))
        micro.assert_same(micro.state(net), {fqn: tensor.double().float() for fqn, tensor in tensors.items()})


@pytest.mark.parametrize("experts", ["per_expert", "fused"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_out_in_and_out_again_is_the_same_file(tmp_path: Path, experts: str, dtype: torch.dtype) -> None:
    tensors, settings = (
        micro.state(micro.model()),
        {"dtype": dtype, "experts": experts, "max_shard_bytes": 200_000},
    )
    hf_config = micro.config()
    digests = []
    for name in ("first", "second"):
        export_hf(tensors.items(), hf_config, None, tmp_path / name, **settings)
        digests.append(
            {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in (tmp_path / name).iterdir()}
        )
        net = build_on_meta(micro.config())
        load_into(net, HFSource(tmp_path / name))
        tensors = micro.state(net)
    assert digests[0] == digests[1]
    assert len(digests[0]) > 4


@pytest.mark.parametrize("layout", ["fused", "per_expert"])
def test_the_sharded_build_loads_unit_by_unit(
    tmp_path: Path, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The build's own order with loading in place of drawing, up to FSDP2 and eight-bit weights."""
    init_world()
    tensors, *both = folders(tmp_path)
    source = HFSource(both[layout == "per_expert"])
    assembly: Assembly = plan_on_meta(
        load_config(
            {
                "model": {"config_name_or_path": "deepseek_v3", "config_overrides": micro.MODEL},
                "low_precision": {"enabled": True},
                "plan_overrides": micro.RULES,
            }
        )
    )
    check_source(assembly.model, source)
    for fqn in assembly.units:
        monkeypatch.setattr(
            "quaver.assembly.build.materialise_unit",
            lambda model, unit, device, fqn=fqn: load_unit(model, fqn, unit, source, device),
        )
        assembly.materialise(fqn, CPU)
        assembly.quantise(fqn)
        assembly.shard(fqn, shard_mesh(None))
    report = source.finish()
    assembly.shard_root(shard_mesh(None))
    assert report.loaded.keys() == tensors.keys()
    assert is_sharded(assembly.model)
    got = {k: getattr(v, "full_tensor", lambda v=v: v)() for k, v in assembly.model.state_dict().items()}
    micro.assert_same(got, tensors)
    assembly.checkpoint_activations()
    assembly.make_optimizer()
    logits = assembly.model(IDS).logits
    assert torch.isfinite(logits).all()


def test_a_unit_exists_alone_while_it_is_loaded(tmp_path: Path) -> None:
    """Other units stay on meta, and nothing of this one is read before all of it fits."""
    _, fused, _ = folders(tmp_path)
    source, net = HFSource(fused), build_on_meta(micro.config())
    units = dict(init_units(net))
    loaded = load_unit(net, "model.layers.1", units["model.layers.1"], source, CPU)
    there = [fqn for fqn, tensor in net.state_dict().items() if not tensor.is_meta]
    assert there == loaded
    assert all(fqn.startswith("model.layers.1.") for fqn in loaded)
    with pytest.raises(PlanError, match="not on meta"):
        load_unit(net, "model.layers.1", units["model.layers.1"], source, CPU)
    with pytest.raises(CheckpointError, match=r"the files hold .* which no parameter of the model takes"):
        source.finish()


def test_loading_draws_no_random_numbers_and_keeps_frozen_parameters_frozen(tmp_path: Path) -> None:
    _, fused, _ = folders(tmp_path)
    net = build_on_meta(micro.config())
    net.model.layers[1].mlp.gate.weight.requires_grad_(False)
    before = torch.get_rng_state()
    load_into(net, HFSource(fused))
    assert torch.equal(torch.get_rng_state(), before)
    frozen = [fqn for fqn, p in net.named_parameters() if not p.requires_grad]
    assert frozen == ["model.layers.1.mlp.gate.weight"]


@pytest.mark.parametrize("fmt", ["mxfp8_e4m3", "hif8"])
def test_an_existing_quantised_model_gets_new_masters_and_new_codes(tmp_path: Path, fmt: str) -> None:
    tensors, _, folder = folders(tmp_path)
    rules = load_config({"plan_overrides": micro.RULES}).plan_overrides
    scaling = {"mxfp8_e4m3": "mx_block", "hif8": "current"}[fmt]
    settings = LowPrecisionConfig(enabled=True, format=fmt, scaling=scaling)
    want, got = micro.model(), micro.model(seed=1)
    quantize_modules(want, settings, plan=rules)
    quantize_modules(got, settings, plan=rules)
    load_into(got, HFSource(folder))
    micro.assert_same(micro.state(got), tensors)
    for fqn, (_, weight) in quantised_weights(got).items():
        expected = quantised_weights(want)[fqn][1].physical
        micro.assert_same(weight.physical, expected)
    assert torch.equal(got(IDS).logits, want(IDS).logits)


def test_an_existing_bf16_model_is_refused(tmp_path: Path) -> None:
    _, fused, _ = folders(tmp_path)
    net = micro.model(seed=1, dtype="bfloat16")
    before = micro.state(net)
    with pytest.raises(CheckpointError, match=r"torch\.bfloat16 would round.*\n.*where: model\.embed_tokens"):
        load_into(net, HFSource(fused))
    micro.assert_same(micro.state(net), before)


def test_nothing_is_written_where_one_key_is_wrong(tmp_path: Path) -> None:
    tensors, *_ = folders(tmp_path)
    del tensors["lm_head.weight"]
    net = micro.model(seed=1)
    before = micro.state(net)
    with pytest.raises(CheckpointError, match=r"the model needs lm_head\.weight"):
        load_into(net, HFSource(micro.write(tmp_path / "short", tensors)))
    micro.assert_same(micro.state(net), before)


def test_per_expert_parameters_are_cut_out_of_a_fused_file(tmp_path: Path) -> None:
    """Models that keep an nn.Linear for each expert ask for per-expert names."""
    tensors, fused, _ = folders(tmp_path)
    want = micro.per_expert(tensors)
    source = HFSource(fused)
    source.check({fqn: tensor.shape for fqn, tensor in want.items()})
    got = dict(source.tensors_for({fqn: tensor.shape for fqn, tensor in want.items()}))
    micro.assert_same(got, want)
    source.finish()


def test_one_tensor_exists_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, folder = folders(tmp_path)
    net, alive, empty = micro.model(seed=1), [], torch.empty

    def allocate(*args: object, **kwargs: object) -> torch.Tensor:
        assert [ref for ref in alive if ref() is not None] == []
        made = empty(*args, **kwargs)
        alive.append(weakref.ref(made))
        return made

    monkeypatch.setattr("quaver.checkpoint.hf_import.torch.empty", allocate)
    load_into(net, HFSource(folder))
    assert len(alive) == len(net.state_dict())


def test_large_tensors_are_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, fused, _ = folders(tmp_path)
    monkeypatch.setattr("quaver.checkpoint.hf_import._CHUNK_BYTES", 7 * 4 * micro.HIDDEN)
    net = build_on_meta(micro.config())
    load_into(net, HFSource(fused))
    micro.assert_same(micro.state(net), tensors)


def test_a_folder_is_equal_with_an_index_without_one_and_as_one_file(tmp_path: Path) -> None:
    tensors, single, _ = folders(tmp_path)
    names = list(tensors)
    shards = {
        f"model-0000{i}-of-00003.safetensors": {name: tensors[name] for name in names[i - 1 :: 3]}
        for i in (1, 2, 3)
    }
    indexed = micro.write_shards(tmp_path / "indexed", shards)
    loose = micro.write_shards(tmp_path / "loose", shards)
    (loose / "model.safetensors.index.json").unlink()
    for folder in (single, indexed, loose):
        net = build_on_meta(micro.config())
        report = load_into(net, HFSource(folder))
        micro.assert_same(micro.state(net), tensors)
        assert len(report.files) == (1 if folder is single else 3)


def test_a_pytorch_file_gives_the_same_model(tmp_path: Path) -> None:
    tensors, fused, _ = folders(tmp_path)
    torch.save(load_file(fused / "model.safetensors"), tmp_path / "pytorch_model.bin")
    net = build_on_meta(micro.config())
    report = load_into(net, HFSource(tmp_path))
    assert report.files == ("pytorch_model.bin",)
    micro.assert_same(micro.state(net), tensors)


def test_multi_token_prediction_layers_of_the_source_are_dropped_with_a_reason(tmp_path: Path) -> None:
    """A DeepSeek file holds one layer more than num_hidden_layers; only its own config says so."""
    tensors, *_ = folders(tmp_path)
    extra = {f"model.layers.3.{name}": torch.zeros(2, 2) for name in ("eh_proj.weight", "mlp.experts.0.x")}
    extra["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    net = build_on_meta(micro.config())
    folder = micro.write(tmp_path / "mtp", tensors | extra, micro.config(num_nextn_predict_layers=1))
    report = load_into(net, HFSource(folder))
    assert report.dropped.keys() == extra.keys()
    assert "layer 3 is a multi-token prediction layer" in report.dropped["model.layers.3.eh_proj.weight"]
    assert "computed from the config" in report.dropped["model.layers.0.self_attn.rotary_emb.inv_freq"]

    for hf_config in (micro.config(num_nextn_predict_layers=0), None):
        folder = micro.write(tmp_path / f"plain-{hf_config is None}", tensors | extra, hf_config)
        with pytest.raises(CheckpointError, match=r"the files hold model\.layers\.3\.eh_proj\.weight"):
            load_into(build_on_meta(micro.config()), HFSource(folder))


def test_a_model_cut_short_does_not_lose_layers_without_a_word(tmp_path: Path) -> None:
    tensors, *_ = folders(tmp_path)
    folder = micro.write(tmp_path / "whole", tensors, micro.config(num_nextn_predict_layers=1))
    with pytest.raises(CheckpointError, match=r"the files hold model\.layers\.2\."):
        load_into(build_on_meta(micro.config(num_hidden_layers=2)), HFSource(folder))


def test_config_differences_that_shapes_cannot_show(tmp_path: Path) -> None:
    tensors, *_ = folders(tmp_path)
    theirs = micro.config(rope_theta=5e5, routed_scaling_factor=2.5, eos_token_id=9)
    source = HFSource(micro.write(tmp_path / "with", tensors, theirs))
    different = source.differences(micro.config())
    assert different.keys() == {"rope_parameters", "routed_scaling_factor"}
    assert different["routed_scaling_factor"] == (2.5, 1.0)
    assert source.differences(theirs) == {}


def test_wanted_shapes_are_the_state_dict_s() -> None:
    net = build_on_meta(micro.config())
    assert wanted_shapes(net) == {fqn: tuple(tensor.shape) for fqn, tensor in net.state_dict().items()}
