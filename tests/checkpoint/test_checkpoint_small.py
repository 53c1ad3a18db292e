"""One process, no process group: what is saved comes back to the bit, and nothing else is taken for it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from small_runs import differing, next_numbers, scatter_generators, small_run, tensors, train_steps

from quaver.checkpoint import CheckpointManager, load, model_view, optimizer_view
from quaver.errors import CheckpointError

PROGRESS = {"step": 3, "updates": 2, "tokens": 999, "window": [0.1, 1e300, float("inf")], "note": "é"}


@pytest.fixture
def saved(tmp_path: Path):
    """A run after three steps and its checkpoint."""
    state = replace(small_run(), progress=PROGRESS, recipe="hif8/current@1")
    scatter_generators(5)
    train_steps(state, 3)
    state.router_bias.rows["layers.0.mlp"] += torch.tensor([4, 0, 2, 1])
    with CheckpointManager(tmp_path / "checkpoints") as manager:
        return state, manager.save(3, state)


def test_everything_comes_back_to_the_bit(saved) -> None:
    state, folder = saved
    wanted, numbers = tensors(state), next_numbers()
    other = small_run(seed=9)
    scatter_generators(77)
    train_steps(other, 1)
    assert len(differing(wanted, tensors(other))) > 10
    loaded = load(folder, other)
    assert next_numbers() == numbers
    assert differing(wanted, tensors(other)) == []
    assert other.loader.cursor == 9
    assert other.router_bias.rows["layers.0.mlp"].tolist() == [4, 0, 2, 1]
    assert (loaded.step, loaded.recipe, loaded.config_digest) == (3, "hif8/current@1", "config")
    assert (loaded.world_size, loaded.rng, loaded.progress) == (1, True, PROGRESS)
    assert torch.equal(other.model.table, small_run(seed=9).model.table), (
        "a buffer that is not persistent was loaded"
    )


def test_goes_on_as_if_unbroken_also_after_a_second_resume(saved, tmp_path: Path) -> None:
    state, folder = saved
    unbroken = train_steps(state, 4)  # nothing was loaded into this one
    resumed, losses = state, []
    for number in range(2):
        resumed = small_run(seed=20 + number)
        scatter_generators(number)
        load(folder, resumed)
        with CheckpointManager(tmp_path / f"copy-{number}") as manager:
            copy = manager.save(number, resumed)
        same = (copy / "__0_0.distcp").read_bytes() == (folder / "__0_0.distcp").read_bytes()
        assert same, "save, load, save changed a byte"
        losses += train_steps(resumed, 2)
        with CheckpointManager(tmp_path / "again") as manager:
            folder = manager.save(4 + number, resumed)
    assert losses == unbroken
    assert differing(tensors(state), tensors(resumed)) == []


def torch_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """A checkpoint as torch's own reader sees it, without any code of ours."""
    metadata = torch_dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    found = {key: torch.empty(tuple(m.size), dtype=m.properties.dtype) for key, m in metadata.items()}
    torch_dcp.load(found, checkpoint_id=folder)
    return found


def test_torch_itself_reads_what_was_saved(saved) -> None:
    state, folder = saved
    found = torch_tensors(folder)
    master = dict(state.model.named_parameters())["second.weight"].detach()
    assert torch.equal(found["optim.second.weight.master"], master)
    assert torch.equal(found["model.second.weight"], master.to(torch.bfloat16))
    moments = state.optimizer.state[state.model.second.weight]
    assert torch.equal(found["optim.second.weight.exp_avg_sq"], moments["exp_avg_sq"])
    assert found["optim.second.weight.step"] == 3
    assert torch.equal(found["model.balance"], state.model.balance)
    assert found["model.balance"].dtype is torch.float32
    assert found["model.count"].dtype is torch.int64
    assert not any("table" in key for key in found)


def test_optimizer_view_aliases_live_storage_and_model_view_does_not(saved) -> None:
    state, _ = saved
    optim, model = optimizer_view(state.model, state.optimizer), model_view(state.model)
    with torch.no_grad():
        state.model.row.fill_(7.0)
        state.optimizer.state[state.model.row]["exp_avg"].fill_(8.0)
    assert optim["row.master"].eq(7).all()
    assert optim["row.exp_avg"].eq(8).all()
    assert not model["row"].eq(7).any()


def test_state_that_never_was_stays_away(saved) -> None:
    state, folder = saved
    assert state.model.unused not in state.optimizer.state
    found = torch_tensors(folder)
    assert found["optim.unused.step"] == 0
    assert not found["optim.unused.exp_avg"].any()
    assert "optim.frozen.exp_avg" not in found
    assert torch.equal(found["optim.frozen.master"], state.model.frozen)
    other = small_run(seed=3)
    other.model.unused.sum().backward()  # here it has a state, which the checkpoint does not
    other.optimizer.step()
    assert other.model.unused in other.optimizer.state
    load(folder, other)
    assert other.model.unused not in other.optimizer.state
    assert other.optimizer.state[other.model.row].keys() == state.optimizer.state[state.model.row].keys()


def test_masters_win_over_the_model_view(tmp_path: Path, monkeypatch) -> None:
    def zeros(model):
        return {k: torch.zeros_like(v) if v.is_floating_point() else v for k, v in model_view(model).items()}

    state = small_run()
    train_steps(state, 1)
    monkeypatch.setattr("quaver.checkpoint.manager.model_view", zeros)
    with CheckpointManager(tmp_path) as manager:
        folder = manager.save(1, state)
    other = small_run(seed=4)
    load(folder, other)
    assert torch.equal(other.model.second.weight, state.model.second.weight)
    load(folder, other, masters=False)
    assert not other.model.second.weight.any()


def test_logical_weights_alone_are_the_masters_rounded(saved) -> None:
    state, folder = saved
    other = small_run(seed=4)
    load(folder, other, masters=False, optimizer=False, rng=False, loader=False)
    for (_, a), (_, b) in zip(state.model.named_parameters(), other.model.named_parameters()):
        assert torch.equal(a.detach().to(torch.bfloat16).float(), b)
    assert not other.optimizer.state
    assert other.loader.cursor == 0


def test_what_is_not_asked_for_is_left_alone(saved) -> None:
    _, folder = saved
    other = small_run(seed=4)
    scatter_generators(1)
    wanted = next_numbers()
    scatter_generators(1)
    loaded = load(folder, other, optimizer=False, rng=False, loader=False)
    assert next_numbers() == wanted
    assert not loaded.rng
    assert not other.optimizer.state
    assert other.loader.cursor == 0
    assert not other.router_bias.rows["layers.0.mlp"].any()


def changed(state, how: str):
    """A run that the checkpoint does not fit."""
    if how == "one more parameter":
        state.model.extra = torch.nn.Parameter(torch.zeros(2, 2))
    elif how == "one parameter fewer":
        del state.model.unused
        state.optimizer.param_groups[0]["params"] = [p for p in state.model.parameters() if p.requires_grad]
    elif how == "another dtype":
        state.model.balance = torch.nn.Buffer(state.model.balance.double())
    elif how == "another thing frozen":
        state.model.row.requires_grad_(False)
        state.optimizer.param_groups[0]["params"] = [p for p in state.model.parameters() if p.requires_grad]
    return state


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("one more parameter", "model.extra is missing"),
        ("one parameter fewer", "optim.unused.exp_avg is not this run's"),
        ("another dtype", r"model.balance is float32 \[4\], this run's is float64 \[4\]"),
        ("another thing frozen", r"optim.row.exp_avg is not this run's(.|\n)*load_optimizer: false"),
    ],
)
def test_keys_are_strict(saved, how: str, words: str) -> None:
    _, folder = saved
    other = changed(small_run(seed=4), how)
    before = tensors(other)
    with pytest.raises(CheckpointError, match=words) as caught:
        load(folder, other)
    assert caught.value.exit_code == 2
    assert differing(before, tensors(other)) == [], "something was loaded all the same"


def test_another_shape_is_named(saved) -> None:
    words = r"model\.first\.weight is bfloat16 \[7, 6\], this run's is bfloat16 \[7, 8\]"
    with pytest.raises(CheckpointError, match=words):
        load(saved[1], small_run(width=8))


def test_frozen_otherwise_is_fine_without_the_optimizer(saved) -> None:
    state, folder = saved
    other = changed(small_run(seed=4), "another thing frozen")
    load(folder, other, optimizer=False)
    assert torch.equal(other.model.row, state.model.row)


def test_another_tokeniser_is_refused(saved) -> None:
    with pytest.raises(CheckpointError, match="another tokeniser") as caught:
        load(saved[1], small_run(tokenizer_digest="other"), optimizer=False)
    assert caught.value.exit_code == 2


def test_optimiser_state_that_would_be_lost_is_refused(tmp_path: Path) -> None:
    state = small_run()
    optimizer = torch.optim.AdamW(state.optimizer.param_groups[0]["params"], amsgrad=True)
    state = replace(state, optimizer=optimizer)
    train_steps(state, 1)
    with CheckpointManager(tmp_path) as manager, pytest.raises(CheckpointError, match="max_exp_avg_sq"):
        manager.save(1, state)


def test_parameters_at_rest_in_bf16_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"bfloat16, not an FP32 master(.|\n)*where: weight"):
        model_view(torch.nn.Linear(2, 2, dtype=torch.bfloat16))


def test_files_are_json_and_tensors_only(saved) -> None:
    _, folder = saved
    names = sorted(path.name for path in folder.iterdir())
    assert names == [
        ".metadata",
        "__0_0.distcp",
        "index.json",
        "manifest.json",
        "rank-00000.json",
        "state.json",
    ]
    for name in names[2:]:
        json.loads((folder / name).read_text())
    assert (folder.parent / "latest").read_text() == "step-00000003\n"
