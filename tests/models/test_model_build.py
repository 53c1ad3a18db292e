"""Building from a config: the same bits as transformers, nothing fetched, nothing run, nothing misread."""

from __future__ import annotations

import json
import random
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tiny_models import TINY, TINY_LLAMA
from transformers import AutoModelForCausalLM, DeepseekV3Config, LlamaConfig

from quaver.errors import ConfigError
from quaver.models import build_on_meta, from_hf_config, load_hf_config
from quaver.models.build import EXPERTS_IMPLEMENTATION


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any attempt to open a connection fails the test, however it is wrapped."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        pytest.fail("a network connection was tried")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("kind", "values"), [("deepseek_v3", TINY), ("llama", TINY_LLAMA)])
def test_same_random_weights_as_transformers(kind: str, values: dict[str, Any], dtype: torch.dtype) -> None:
    config = {"deepseek_v3": DeepseekV3Config, "llama": LlamaConfig}[kind](**values)
    torch.manual_seed(3)
    want = AutoModelForCausalLM.from_config(config, dtype=dtype)
    torch.manual_seed(3)
    got = from_hf_config(kind, config_overrides=values, torch_dtype=dtype)
    assert type(got) is type(want)
    assert got.training
    want_state, got_state = want.state_dict(), got.state_dict()
    assert list(got_state) == list(want_state)
    for key, tensor in got_state.items():
        assert torch.equal(tensor, want_state[key])
        assert tensor.dtype == (torch.float32 if ".gate." in key else dtype), key


def test_forms_of_the_source(tmp_path: Path) -> None:
    DeepseekV3Config(**TINY).save_pretrained(tmp_path)
    want = load_hf_config("deepseek_v3", TINY).to_dict()
    for source in (tmp_path, str(tmp_path), tmp_path / "config.json"):
        got = load_hf_config(source).to_dict()
        assert {k: got[k] for k in TINY if k in got} == {k: want[k] for k in TINY if k in want}
    assert load_hf_config(tmp_path, {"num_hidden_layers": 5}).num_hidden_layers == 5


def test_overrides_are_applied_before_fields_are_derived() -> None:
    config = load_hf_config("deepseek_v3", {**TINY, "qk_rope_head_dim": 32})
    assert (config.qk_head_dim, config.head_dim) == (48, 32)


def test_an_override_replaces_a_field_under_its_other_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "deepseek_v3", **TINY}))
    config = load_hf_config(tmp_path, {"num_local_experts": 8})
    assert config.n_routed_experts == config.num_local_experts == 8
    with pytest.raises(ConfigError, match="one field"):
        load_hf_config(tmp_path, {"num_local_experts": 8, "n_routed_experts": 8})


def test_rope_theta_reaches_the_rope_parameters(tmp_path: Path) -> None:
    DeepseekV3Config(**TINY).save_pretrained(tmp_path)
    assert load_hf_config(tmp_path, {"rope_theta": 500.0}).rope_parameters["rope_theta"] == 500.0
    assert load_hf_config("deepseek_v3", {**TINY, "rope_theta": 500.0}).rope_parameters["rope_theta"] == 500.0
    scaled = load_hf_config(
        tmp_path, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_theta": 7.0}
    )
    assert (scaled.rope_parameters["rope_type"], scaled.rope_parameters["rope_theta"]) == ("linear", 7.0)
    DeepseekV3Config(**TINY, rope_theta=900.0).save_pretrained(tmp_path)
    scaled = load_hf_config(tmp_path, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}})
    assert (scaled.rope_parameters["rope_type"], scaled.rope_parameters["rope_theta"]) == ("linear", 900.0)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"hiden_size": 64}, "did you mean hidden_size"),
        ({"torch_dtype": "float32"}, "model.torch_dtype"),
        ({"attn_implementation": "sdpa"}, "model.attn_implementation"),
        ({"model_type": "llama"}, "model.config_name_or_path"),
        ({"auto_map": {"AutoConfig": "evil.Config"}}, "no field auto_map"),
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"hidden_size": 0}, "hidden_size must be at least 1"),
        ({"num_hidden_layers": -1}, "num_hidden_layers must be at least 1"),
        ({"head_dim": 3}, "no field head_dim"),
        ({"num_experts_per_tok": 5}, "more experts than there are"),
        ({"num_experts_per_tok": 0}, "more experts than there are"),
        ({"n_group": 3}, "do not divide"),
        ({"n_group": 4}, "a group needs two experts"),
        ({"n_group": 2, "num_experts_per_tok": 3}, "too few experts"),
        ({"topk_group": 2}, "too few experts"),
    ],
)
def test_refused_overrides(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_hf_config("deepseek_v3", {**TINY, **overrides})
    assert message in str(caught.value)


def test_sizes_that_cannot_be_built() -> None:
    with pytest.raises(ConfigError, match="cannot build DeepseekV3ForCausalLM"):
        build_on_meta(load_hf_config("deepseek_v3", {**TINY, "intermediate_size": -4}))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("deepseek_v4x", "did you mean deepseek_v"),
        ("deepseek-ai/DeepSeek-V3", "nothing is fetched"),
        ("/no/such/folder", "nothing is fetched"),
    ],
)
def test_unknown_sources(name: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_hf_config(name)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "3", '{"hidden_size": 4}', '{"model_type": "nope"}', '{"model_type": 3}', "[" * 100_000],
)
def test_unreadable_files(tmp_path: Path, text: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_hf_config(tmp_path)
    assert str(file.parent) in str(caught.value)


def test_a_folder_without_a_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        load_hf_config(tmp_path)


def test_a_model_that_is_no_causal_lm() -> None:
    with pytest.raises(ConfigError, match="no causal language model"):
        from_hf_config("vit")


def test_remote_code_is_never_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A folder that asks for its own code gets the installed class, and its module is not imported."""
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nraise SystemExit('ran')\n")
    auto = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    values = {
        "model_type": "deepseek_v3",
        "auto_map": auto,
        "quantization_config": {"quant_method": "fp8"},
        **TINY,
    }
    (tmp_path / "config.json").write_text(json.dumps(values))
    model = from_hf_config(tmp_path)
    assert type(model).__module__ == "transformers.models.deepseek_v3.modeling_deepseek_v3"
    assert not (tmp_path / "ran").exists()
    assert not hasattr(model.config, "quantization_config")
    assert "quantization_config is not used" in caplog.text


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"torch_dtype": torch.float16}, "torch_dtype"),
        ({"torch_dtype": "float8"}, "torch_dtype"),
        ({"attn_implementation": "flash_attention_2"}, "sdpa or eager"),
        ({"attn_implementation": "kernels-community/flash-attn"}, "sdpa or eager"),
    ],
)
def test_unsupported_build_options(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_hf_config("deepseek_v3", config_overrides=TINY, **kwargs)


def test_meta_build_takes_no_memory_no_randomness_and_no_process_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a process group was started")

    monkeypatch.setattr(dist, "init_process_group", refuse)
    config = load_hf_config("deepseek_v3", TINY)
    before = config.to_dict()
    states = torch.get_rng_state(), random.getstate()
    model = build_on_meta(config, torch.bfloat16, "eager")
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    tensors = [*model.parameters(), *model.buffers()]
    assert tensors
    assert all(tensor.is_meta for tensor in tensors)
    assert model.config is not config
    assert config.to_dict() == before
    assert model.config._attn_implementation == "eager"
    assert model.lm_head.weight.dtype == torch.bfloat16


def test_a_router_bias_in_another_dtype_is_made_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some versions of transformers build it in the model's dtype, where 0.6 + 0.001 stays 0.6."""
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as source

    original = source.DeepseekV3TopkRouter.__init__

    def in_bfloat16(self: Any, config: Any) -> None:
        original(self, config)
        self.e_score_correction_bias = torch.nn.Buffer(self.e_score_correction_bias.bfloat16())

    monkeypatch.setattr(source.DeepseekV3TopkRouter, "__init__", in_bfloat16)
    for model in (
        from_hf_config("deepseek_v3", config_overrides=TINY),
        build_on_meta(load_hf_config("deepseek_v3", TINY)),
    ):
        biases = [b for name, b in model.named_buffers() if name.endswith("e_score_correction_bias")]
        assert [b.dtype for b in biases] == [torch.float32] * 2
        assert "model.layers.1.mlp.gate.e_score_correction_bias" in model.state_dict()


def test_the_experts_implementation_trains_on_the_cpu_with_idle_experts() -> None:
    """It equals a loop over tokens in FP32, and an expert without tokens gets a gradient of zeros."""
    torch.manual_seed(0)
    model = from_hf_config("deepseek_v3", config_overrides=TINY, torch_dtype=torch.float32)
    assert model.config._experts_implementation == EXPERTS_IMPLEMENTATION == "grouped_mm"
    experts = model.model.layers[1].mlp.experts
    x_TH = torch.randn(32, 64)
    chosen_Tk = torch.tensor([[0, 2]] * 20 + [[2, 0]] * 12)  # experts 1 and 3 are idle
    weights_Tk = torch.rand(32, 2)
    y_TH = experts(x_TH, chosen_Tk, weights_Tk)
    want_TH = torch.zeros_like(x_TH)
    for t in range(32):
        for k in range(2):
            e = int(chosen_Tk[t, k])
            gate, up = (experts.gate_up_proj[e] @ x_TH[t]).chunk(2)
            want_TH[t] += weights_Tk[t, k] * (experts.down_proj[e] @ (torch.nn.functional.silu(gate) * up))
    torch.testing.assert_close(y_TH, want_TH)
    y_TH.square().sum().backward()
    for weight in experts.parameters():
        assert weight.grad is not None
        norms = weight.grad.flatten(1).norm(dim=1)
        assert (norms[[1, 3]] == 0).all()
        assert (norms[[0, 2]] > 0).all()
    bf16 = from_hf_config("deepseek_v3", config_overrides=TINY)
    ids = torch.randint(0, 128, (2, 16))
    bf16(ids, labels=ids).loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in bf16.parameters())
