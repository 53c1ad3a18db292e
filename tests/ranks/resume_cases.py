"""One leg of a run that stops and goes on: `quaver.training.train` itself, watched at its first step.

A step of the case's `poison` gets a non-finite gradient on the last rank alone, so that all have to agree to skip it.
"""

from __future__ import annotations

import hashlib
import math
import shutil
from typing import Any

import torch
import torch.distributed as dist
from cases import reference_case, train_or_refuse, whole, whole_masters

from quaver.assembly import Assembly
from quaver.checkpoint import CheckpointManager
from quaver.distributed import gather_rows, local_tensor
from quaver.training import step as steps
from quaver.training import train


def leg(case: dict[str, Any]) -> dict[str, Any]:
    """Trains from `case["start"]` steps on; returns how it ended and what its first step started from.

    `first`: digests of masters and moments, and the summed nats of each micro-batch in the order of the data;
    `windows`: what each sample of the leg holds, in that order; `beside`: for each save that was asked for, whether
    it was still being written when the training went on.
    """
    accumulate, token_nats = steps.accumulate, steps.token_nats
    nats: list[float] = []
    taken = [case["start"]]
    first: dict[str, Any] = {}
    windows: list[str] = []
    beside: list[bool] = []
    save = CheckpointManager.save

    def watched_save(self: CheckpointManager, *arguments: Any) -> Any:
        path = save(self, *arguments)
        beside.append(self.in_flight)
        return path

    def watched_nats(model: Any, batch: Any) -> torch.Tensor:
        loss = token_nats(model, batch)
        nats.append(loss.item())
        return loss

    def watched(assembly: Assembly, batches: Any) -> tuple[float, int]:
        taken[0] += 1
        begins = not first
        if begins:
            first.update(masters=digests(whole_masters(assembly)), moments=digests(moments(assembly)))
            nats.clear()
        windows.extend(samples(batches))
        loss, tokens = accumulate(assembly, batches)
        if begins:
            rows = gather_rows(torch.tensor(nats, dtype=torch.float64))
            first["nats"] = [value.hex() for value in rows.t().flatten().tolist()]
        if taken[0] in case.get("poison", ()) and dist.get_rank() == dist.get_world_size() - 1:
            grads = (p.grad for p in assembly.model.parameters() if p.grad is not None)
            next(g for g in map(local_tensor, grads) if g.numel()).view(-1)[0] = math.inf
        return loss, tokens

    steps.accumulate, steps.token_nats = watched, watched_nats
    CheckpointManager.save = watched_save
    try:
        result = train(case["document"], case["overrides"], out=case["out"], resume=case.get("resume", False))
    finally:
        steps.accumulate, steps.token_nats = accumulate, token_nats
        CheckpointManager.save = save
    return {
        "steps": result.steps,
        "val_loss": result.val_loss.hex(),
        "first": first,
        "windows": windows,
        "beside": beside,
    }


def samples(batches: Any) -> list[str]:
    """A digest of each sample of a step, over all ranks, in the order of the data: micro-steps, ranks, rows."""
    rows = [row for batch in batches for row in batch.input_ids]
    mine = [hashlib.sha256(row.numpy().tobytes()).hexdigest()[:15] for row in rows]
    found = gather_rows(torch.tensor([int(digest, 16) for digest in mine]))
    in_order = found.view(len(found), len(batches), -1).transpose(0, 1).flatten()
    return [f"{number:015x}" for number in in_order.tolist()]


def unbroken_and_resumed(case: dict[str, Any]) -> dict[str, Any]:
    """A run to its end; and one that stops, is copied as it is then, and goes on."""
    shared = {**case, "start": 0}
    leg({**shared, "out": case["whole"]})
    leg(
        {
            **shared,
            "out": case["broken"],
            "overrides": [*case["overrides"], f"training.stop_after={case['stop']}"],
        }
    )
    if dist.get_rank() == 0:
        shutil.copytree(case["broken"], case["early"])
    dist.barrier()
    return leg({**shared, "out": case["broken"], "start": case["stop"], "resume": True})


def one_of(case: dict[str, Any]) -> dict[str, Any]:
    """The function that the case names, so that cases of several share one start of the ranks."""
    chosen = (leg, reference_case, train_or_refuse, unbroken_and_resumed)
    return {function.__name__: function for function in chosen}[case["do"]](case)


def moments(assembly: Assembly) -> dict[str, torch.Tensor]:
    """Both moments of every parameter, whole."""
    found = {}
    for name, parameter in assembly.model.named_parameters():
        for key, value in assembly.optimizer.state.get(parameter, {}).items():
            if key != "step":
                found[f"{key}.{name}"] = whole(parameter, local_tensor(value).contiguous())
    return found


def digests(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """SHA-256 of each tensor's bytes."""
    return {name: hashlib.sha256(t.numpy().tobytes()).hexdigest() for name, t in tensors.items()}
