"""What two ranks do to checkpoints, each scene once, in one pair of processes; results go to files for the tests."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from small_runs import differing, next_numbers, scatter_generators, small_run, tensors, train_steps
from torch.distributed.device_mesh import init_device_mesh

from quaver.checkpoint import CheckpointManager, TrainState, dcp, find_latest, load, manager
from quaver.checkpoint.manifest import describe_files, read_manifest
from quaver.distributed import like_sharded, local_tensor
from quaver.errors import CheckpointError
from quaver.low_precision import quantised_weights

Result = dict[str, Any]


def save_and_resume(folder: Path, mesh, rank: int) -> Result:
    """The same number of ranks: everything of each rank comes back, and the run goes on alike."""
    state = small_run(mesh)
    scatter_generators(10 * rank)
    train_steps(state, 3)
    state.router_bias.rows["layers.0.mlp"] += torch.tensor([rank + 1, 0, 5, 0])
    with CheckpointManager(folder / "two", on_phase=lambda step, phase: None) as saver:
        path = saver.save(3, state)
        found = saver.find_latest()
    wanted = tensors(state)
    if rank == 0:
        torch.save(wanted, folder / "two.pt")
    numbers, losses = next_numbers(), train_steps(state, 2)
    other = small_run(mesh, seed=3)
    loaded = load(path, other)
    same, cursor = differing(wanted, tensors(other)) == [], other.loader.cursor
    return {
        "found": found.path.name,
        "same": same,
        "numbers": next_numbers() == numbers,
        "losses": train_steps(other, 2) == losses,
        "end": differing(tensors(state), tensors(other)) == [],
        "counts": other.router_bias.rows["layers.0.mlp"].tolist(),
        "rng": loaded.rng,
        "cursor": cursor,
        "ranks_differ": numbers,
    }


def load_of_one_rank(folder: Path, mesh, rank: int) -> Result:
    """1 -> 2 ranks."""
    state = small_run(mesh, seed=3)
    scatter_generators(rank)
    before = next_numbers()
    scatter_generators(rank)
    loaded = load(folder / "one" / "step-00000003", state)
    return {
        "untouched_rng": next_numbers() == before and not loaded.rng,
        "differing": differing(tensors(state), torch.load(folder / "one.pt")),
        "counts": state.router_bias.rows["layers.0.mlp"].tolist(),
        "saved_by": loaded.world_size,
    }


def save_beside_training(folder: Path, mesh, rank: int) -> Result:
    """Asynchronous, with the training's own collectives going on; the copy takes longer than a forward and backward."""
    state, copied = small_run(mesh), dcp.copied
    train_steps(state, 1)
    dcp.copied = lambda live: (time.sleep(1.0 + rank), copied(live))[1]
    with CheckpointManager(folder / "beside", asynchronous=True) as saver:
        wanted = tensors(state)
        path = saver.save(1, state)
        for _ in range(5):
            train_steps(state, 1)
            saver.poll()
        dcp.copied = copied
        saver.save(2, state)
        moved = differing(wanted, tensors(state)) != []
    other = small_run(mesh, seed=3)
    load(path, other)
    return {
        "same": differing(wanted, tensors(other)) == [],
        "moved": moved,
        "names": sorted(p.name for p in (folder / "beside").iterdir()),
    }


def replicated(folder: Path, mesh, rank: int) -> Result:
    """Two replicas of one shard: each byte is written once."""
    hybrid = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    state = small_run(hybrid)
    scatter_generators(0)
    train_steps(state, 2)
    with CheckpointManager(folder / "replicated") as saver:
        path = saver.save(2, state)
    other = small_run(mesh, seed=3)  # and on from replicas to shards
    load(path, other)
    size = sum(p.stat().st_size for p in path.glob("*.distcp"))
    return {"same": differing(tensors(state), tensors(other)) == [], "bytes": size}


def gathered_when_saved(folder: Path, mesh, rank: int) -> Result:
    """After a validation forward whose gathered weights were never freed."""
    state = small_run(mesh)
    for module in (state.model.first, state.model):
        module.set_reshard_after_forward(False)
    with torch.no_grad():
        state.model(torch.ones(2, 6, dtype=torch.bfloat16))
    assert not hasattr(state.model.second.weight, "full_tensor"), (
        "nothing is gathered: the scene shows nothing"
    )
    with CheckpointManager(folder / "gathered") as saver:
        path = saver.save(1, state)
    other = small_run(mesh, seed=3)
    load(path, other)
    return {"same": differing(tensors(state), tensors(other)) == []}


def one_rank_fails(folder: Path, mesh, rank: int) -> Result:
    """A disk that is full for one rank: both raise the same, and what was there stays."""
    place, state = folder / "failing", small_run(mesh)
    results: Result = {}

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device", "one rank's disk")

    def broken(*args, **kwargs):
        raise RuntimeError("a bug on one rank")

    scenes: dict[str, tuple[Any, str, int, Callable]] = {
        "tensors": (dcp.Writer, "write_data", 1, full),
        "records": (manager, "write_durably", 1, full),
        "digests": (manager, "describe_files", 1, full),
        "copying": (dcp, "copied", 1, full),
        "publishing": (manager.SaveSteps, "publish", 0, broken),
    }
    for asynchronous in (False, True):
        with CheckpointManager(place, asynchronous=asynchronous) as saver:
            saver.save(1, state)
            saver.wait()
            for name, (owner, attribute, failing, fault) in scenes.items():
                if name == "copying" and not asynchronous:
                    continue
                original = getattr(owner, attribute)
                if rank == failing:
                    setattr(owner, attribute, fault)
                try:
                    saver.save(2, state)
                    saver.wait()
                    told: Any = None
                except (CheckpointError, RuntimeError) as error:
                    told = [
                        type(error).__name__,
                        str(error).split("\n")[0],
                        getattr(error, "exit_code", None),
                    ]
                setattr(owner, attribute, original)
                results[f"{name}-{asynchronous}"] = told
            dist.barrier()  # the first rank cleans up, then all look
            results[f"left-{asynchronous}"] = sorted(p.name for p in place.iterdir())
    return results


def polled_together(folder: Path, mesh, rank: int) -> Result:
    """An asynchronous error comes up at the same poll on both ranks, however late one of them learns of it."""
    state = small_run(mesh)
    original = dcp.Writer.write_data

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    with CheckpointManager(folder / "polled", asynchronous=True) as saver:
        dcp.Writer.write_data = full if rank == 1 else original
        saver.save(1, state)
        for poll in range(10_000):
            try:
                saver.poll()
                train_steps(state, 1)
            except CheckpointError as error:
                dcp.Writer.write_data = original
                return {"poll": poll, "what": error.what}
    return {}


def damaged_for_one_rank(folder: Path, mesh, rank: int) -> Result:
    """What only one rank reads is broken: both say so, none goes on."""
    state = small_run(mesh)
    with CheckpointManager(folder / "damaged", keep=3) as saver:
        paths = [saver.save(step, state) for step in (1, 2)]
    dist.barrier()
    if rank == 0:  # digests are right, but the record of rank 1 is none
        record = paths[1] / "rank-00001.json"
        text = json.loads(record.read_text())
        record.write_text(json.dumps(text | {"random": None}))
        manifest = read_manifest(paths[1])
        files = describe_files(paths[1], manifest.files)
        (paths[1] / "manifest.json").write_bytes(manifest.model_copy(update={"files": files}).to_bytes())
    dist.barrier()
    results: Result = {}
    try:
        load(paths[1], state)
    except CheckpointError as error:
        results["load"] = [error.what, error.exit_code]
    dist.barrier()
    for name in ("__0_0.distcp", "__1_0.distcp"):
        data = (paths[1] / name).read_bytes()
        dist.barrier()
        if rank == 0:
            (paths[1] / name).write_bytes(data[:-1])
        dist.barrier()
        found = find_latest(folder / "damaged")
        results[name] = [found.path.name, found.skipped[0][1]]
        dist.barrier()
        if rank == 0:
            (paths[1] / name).write_bytes(data)
        dist.barrier()
    return results


def low_precision(folder: Path, mesh, rank: int) -> Result:
    """Shards of a micro DeepSeek-V3 in eight bits; its configs were written by the test."""
    results: Result = {}
    for fmt in ("mxfp8", "hif8"):
        state = micro_run(folder / f"{fmt}.yaml", mesh)
        for parameter in state.model.parameters():
            master = local_tensor(parameter.detach())
            parameter.grad = like_sharded(parameter, torch.randn(master.shape) + rank)
        state.optimizer.step()
        with CheckpointManager(folder / fmt) as saver:
            path = saver.save(1, state)
        other = micro_run(folder / f"{fmt}.yaml", mesh)
        load(path, other)
        whole, mine, loaded = tensors(state), codes(state), codes(other)
        torch.save(mine, folder / f"{fmt}-codes-{rank}.pt")
        if rank == 0:
            torch.save(whole, folder / f"{fmt}.pt")
        results[fmt] = [differing(whole, tensors(other)), differing(mine, loaded), len(mine)]
    return results


def micro_run(config: Path, mesh) -> TrainState:
    """A built run of a config."""
    from quaver.assembly import assemble
    from quaver.config import load_config

    assembly = assemble(load_config(config), mesh, torch.device("cpu"))
    facts = {
        "recipe": "eight bits",
        "config_digest": "config",
        "tokenizer_digest": "tokenizer",
        "progress": {},
    }
    return TrainState(assembly.model, assembly.optimizer, router_bias=assembly.router_bias, **facts)


def codes(state: TrainState) -> dict[str, torch.Tensor]:
    """This rank's physical tensors; StaleWeightError if one is behind its master."""
    weights = quantised_weights(state.model)
    return {f"{fqn}:{field}": t.clone() for fqn, (_, w) in weights.items() for field, t in w.physical.items()}


SCENES = (
    save_and_resume,
    load_of_one_rank,
    save_beside_training,
    replicated,
    gathered_when_saved,
    one_rank_fails,
    polled_together,
    damaged_for_one_rank,
    low_precision,
)


def run(rank: int, folder: str) -> None:
    """Entry of each process."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    results = {}
    for scene in SCENES:
        try:
            results[scene.__name__] = scene(Path(folder), mesh, rank)
        except Exception:
            results[scene.__name__] = {"raised": traceback.format_exc()}
        Path(folder, f"results-{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()
