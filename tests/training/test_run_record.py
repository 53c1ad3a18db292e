"""What a run writes beside its ledger: the lines of metrics.jsonl, TensorBoard's copy of them, the environment."""

from __future__ import annotations

import json
import platform
import sys
from importlib.metadata import version

import pytest
import torch

from quaver.training import Silent, train

STEP_KEYS = {"step", "loss", "grad_norm", "lr", "tokens", "tokens_per_s", "skipped"}


@pytest.mark.parametrize("fmt", ["bf16", "hif8"])
def test_lines_have_the_keys_of_the_contract_and_no_others(micro, tmp_path, read_metrics, fmt: str) -> None:
    run = train(
        micro(fmt, "training.validate_every=2", "gradient_accumulation_steps=2"), out=tmp_path / "run"
    )
    lines = read_metrics(run.dir)
    kinds = ["val" if "val_loss" in line else "step" for line in lines]
    assert kinds == ["val", "step", "step", "val", "step", "step", "val"]
    for kind, line in zip(kinds, lines):
        assert line.keys() == ({"step", "val_loss", "val_bpb"} if kind == "val" else STEP_KEYS)
    assert [line["step"] for line in lines] == [0, 1, 2, 2, 3, 4, 4]
    assert [line["tokens"] for line in lines if "loss" in line] == [128, 256, 384, 512]
    assert all(line["tokens_per_s"] > 0 and line["skipped"] == 0 for line in lines if "loss" in line)


def test_samples_are_lines_of_their_own(micro, tmp_path, read_metrics) -> None:
    wanted = ("training.sample_tokens=3", "training.sample_prompts=['def ', 'x']", "training.steps=1")
    run = train(micro("bf16", *wanted), out=tmp_path / "run")
    *_, last = read_metrics(run.dir)
    assert last.keys() == {"step", "samples"}
    assert [sample.keys() for sample in last["samples"]] == [{"prompt", "text"}] * 2
    assert [sample["prompt"] for sample in last["samples"]] == ["def ", "x"]


def test_tensorboard_holds_the_numbers_of_the_metrics(micro, tmp_path, read_metrics) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = train(micro("bf16", "training.tensorboard=true", "training.steps=2"), out=tmp_path / "run")
    assert list((run.dir / "tensorboard").glob("events.out.tfevents.*"))
    events = EventAccumulator(str(run.dir / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == (STEP_KEYS | {"val_loss", "val_bpb"}) - {"step"}
    single = lambda value: torch.tensor(value, dtype=torch.float32).item()  # noqa: E731  what an event holds
    lines = read_metrics(run.dir)
    for key in ("loss", "grad_norm", "lr", "tokens", "skipped", "val_loss"):
        wanted = [(line["step"], single(line[key])) for line in lines if key in line]
        assert [(event.step, event.value) for event in events.Scalars(key)] == wanted


def test_tensorboard_is_off_unless_asked_for(micro, tmp_path) -> None:
    run = train(micro("bf16", "training.steps=1"), out=tmp_path / "run")
    assert not (run.dir / "tensorboard").exists()


@pytest.mark.parametrize(
    ("fmt", "recipe"), [("bf16", None), ("mxfp8", "mxfp8_e4m3/mx_block/floor@1"), ("hif8", "hif8/current@1")]
)
def test_environment_says_what_ran_and_where(micro, tmp_path, monkeypatch, fmt: str, recipe) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    config = micro(fmt, "training.steps=1", "model.freeze=[lm_head]", "seed=11")
    run = train(config, out=tmp_path / "run")
    found = json.loads((run.dir / "environment.json").read_text())
    assert found["recipe"] == recipe
    assert found["backend"] == ("reference" if recipe else None)
    assert found["seed"] == 11
    assert found["ranks"] == 1
    assert found["device"] == "cpu"
    assert found["threads"] == 1
    assert found["omp_num_threads"] == "1"
    assert found["command"] == sys.argv
    assert found["versions"]["python"] == platform.python_version()
    for package in ("torch", "transformers", "safetensors", "tokenizers", "numpy", "pydantic"):
        assert found["versions"][package] == version(package)
    assert found["tokenizer"]["name"] == "byte"
    assert found["frozen"] == {"lm_head": ["lm_head.weight"]}
    assert found["replicated"] == []
    # by hand: two tables, three layers' MLA and norms, the dense layer, two MoE layers, the last norm
    mla = 64 * 2 * 32 + 64 * (32 + 16) + 32 + 32 * 2 * (16 + 32) + 2 * 32 * 64
    moe = 4 * 64 + 4 * 3 * 64 * 48 + 3 * 64 * 48
    assert found["parameters"] == 2 * 260 * 64 + 3 * (mla + 2 * 64) + 3 * 64 * 96 + 2 * moe + 64


def test_a_run_asks_torch_for_the_same_bits_each_time(micro, tmp_path) -> None:
    """Deterministic kernels are on while it trains, and memory that is never read is not filled."""
    seen = []

    class Watching(Silent):
        def on_step(self, *_) -> None:
            filled = torch.utils.deterministic.fill_uninitialized_memory
            seen.append((torch.are_deterministic_algorithms_enabled(), filled))

    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        train(micro("bf16", "training.steps=2"), out=tmp_path / "run", observer=Watching())
    finally:
        torch.use_deterministic_algorithms(before)
    assert seen == [(True, False)] * 2
