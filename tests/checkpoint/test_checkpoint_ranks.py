"""Two ranks save together, fail together, and hand a run on to one rank and back, to the bit."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
import two_ranks
from helpers.micro import FORMATS, MODEL, RULES
from small_runs import differing, next_numbers, scatter_generators, small_run, tensors, train_steps

from quaver.checkpoint import CheckpointManager, load
from quaver.distributed import init_world, shard_mesh


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one rank, and what two ranks then did."""
    folder, state = tmp_path_factory.mktemp("ranks"), small_run()
    train_steps(state, 3)
    state.router_bias.rows["layers.0.mlp"] += torch.tensor([7, 0, 0, 1])
    with CheckpointManager(folder / "one") as manager:
        manager.save(3, state)
    torch.save(tensors(state), folder / "one.pt")
    for fmt in ("mxfp8", "hif8"):
        (folder / f"{fmt}.yaml").write_text(json.dumps(document(fmt)))
    torch.multiprocessing.spawn(two_ranks.run, args=(str(folder),), nprocs=2)
    return folder


def document(fmt: str) -> dict:
    """The micro DeepSeek-V3 of the training tests; JSON is YAML."""
    return {
        "model": {"config_name_or_path": "deepseek_v3", "config_overrides": MODEL},
        "low_precision": FORMATS[fmt],
        "plan_overrides": RULES,
    }


@pytest.fixture
def results(folder: Path):
    """results(scene) -> what each rank reported of it."""

    def read(scene: str) -> list[dict]:
        both = [json.loads((folder / f"results-{rank}.json").read_text())[scene] for rank in range(2)]
        for rank, result in enumerate(both):
            assert "raised" not in result, f"rank {rank}: {result['raised']}"
        return both

    return read


def test_two_ranks_resume_to_the_bit(results) -> None:
    for rank, result in enumerate(results("save_and_resume")):
        assert result["found"] == "step-00000003"
        assert all(result[key] for key in ("same", "numbers", "losses", "end", "rng")), result
        assert result["counts"] == [rank + 1, 0, 5, 0]
        assert result["cursor"] == 9
    first, second = results("save_and_resume")
    assert first["ranks_differ"] != second["ranks_differ"], (
        "both ranks had the same generators: nothing was shown"
    )


def test_two_ranks_to_one(folder: Path, results) -> None:
    results("save_and_resume")
    path = folder / "two" / "step-00000003"
    other = small_run(seed=3)
    scatter_generators(99)
    before = next_numbers()
    scatter_generators(99)
    loaded = load(path, other)
    assert differing(tensors(other), torch.load(folder / "two.pt")) == []
    assert other.router_bias.rows["layers.0.mlp"].tolist() == [3, 0, 10, 0], "the sum of both ranks' counts"
    assert (loaded.world_size, loaded.rng, next_numbers() == before) == (2, False, True)
    metadata = torch_dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    rows = [chunk.sizes[0] for chunk in metadata["optim.first.weight.master"].chunks]
    assert rows == [4, 3], "not sharded: nothing was shown"


def test_one_rank_to_two(results) -> None:
    for rank, result in enumerate(results("load_of_one_rank")):
        assert result["differing"] == []
        assert result["untouched_rng"]
        assert result["saved_by"] == 1
        assert result["counts"] == ([7, 0, 0, 1] if rank == 0 else [0, 0, 0, 0])


def test_saving_beside_the_training_of_two_ranks(results) -> None:
    for result in results("save_beside_training"):
        assert result["same"]
        assert result["moved"]
        assert result["names"] == ["latest", "step-00000001", "step-00000002"]


def test_replicas_are_written_once(folder: Path, results) -> None:
    sharded = sum(p.stat().st_size for p in (folder / "two" / "step-00000003").glob("*.distcp"))
    for result in results("replicated"):
        assert result["same"]
        assert result["bytes"] < sharded, "replicas were written twice"


def test_saving_while_weights_are_gathered(results) -> None:
    assert all(result["same"] for result in results("gathered_when_saved"))


def test_a_failure_on_one_rank_is_one_on_all(results) -> None:
    both = results("one_rank_fails")
    full = ["CheckpointError", "the checkpoint could not be written: No space left on device", 3]
    for asynchronous in ("False", "True"):
        for result in both:
            for scene in ("tensors", "records", "digests", *(("copying",) if asynchronous == "True" else ())):
                assert result[f"{scene}-{asynchronous}"] == full, scene
            assert result[f"left-{asynchronous}"] == ["latest", "step-00000001"]
    for key in ("publishing-False", "publishing-True"):
        assert both[0][key] == ["RuntimeError", "a bug on one rank", None]
        assert both[1][key] == ["CheckpointError", "rank 0 failed: RuntimeError: a bug on one rank", 3]


def test_an_error_beside_the_training_ends_both_ranks_at_the_same_step(results) -> None:
    first, second = results("polled_together")
    assert first == second
    assert "No space left on device" in first["what"]


@pytest.mark.parametrize("fmt", ["mxfp8", "hif8"])
def test_eight_bit_shards_and_on_to_one_rank(folder: Path, results, fmt: str) -> None:
    for tensors_differing, codes_differing, count in (result[fmt] for result in results("low_precision")):
        assert tensors_differing == codes_differing == []
        assert count == 25 * (4 if fmt == "mxfp8" else 2)
    init_world()
    state = two_ranks.micro_run(folder / f"{fmt}.yaml", shard_mesh(None))
    load(folder / fmt / "step-00000001", state)
    assert differing(tensors(state), torch.load(folder / f"{fmt}.pt")) == []
    shards = [torch.load(folder / f"{fmt}-codes-{rank}.pt") for rank in range(2)]
    whole = two_ranks.codes(state)
    compared = 0
    for key, tensor in whole.items():
        field = key.partition(":")[2]
        if field == "scale" and tensor.numel() == 1:  # HiF8 has one scale for a whole dense weight
            assert torch.equal(shards[0][key], tensor)
            assert torch.equal(shards[1][key], tensor)
            compared += 1
        elif not field.startswith("col"):  # MXFP8's column blocks cross the shards' border
            assert torch.equal(torch.cat([shards[0][key], shards[1][key]]), tensor), key
            compared += 1
    assert compared == 50


def test_damage_that_one_rank_sees_is_seen_by_both(results) -> None:
    first, second = results("damaged_for_one_rank")
    assert first == second
    assert first["load"] == ["a file of the checkpoint is not what it should be", 2]
    for name in ("__0_0.distcp", "__1_0.distcp"):
        path, reason = first[name]
        assert path == "step-00000001"
        assert reason.startswith(f"{name} has ")
