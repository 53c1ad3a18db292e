"""What is in a checkpoint, read with torch's own reader and none of Quaver's loading."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict


def saved_tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, whole, by its dotted key."""
    found: dict[str, Any] = {}
    _load_state_dict(
        found, storage_reader=FileSystemReader(checkpoint), planner=_EmptyStateDictLoadPlanner(), no_dist=True
    )
    flat: dict[str, torch.Tensor] = {}
    _flatten(found, "", flat)
    return flat


def _flatten(node: Any, path: str, into: dict[str, torch.Tensor]) -> None:
    if isinstance(node, torch.Tensor):
        into[path] = node
        return
    for key, value in node.items():
        _flatten(value, f"{path}.{key}" if path else key, into)


def differing(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    """Keys that only one has, or whose dtype, shape or bits differ."""
    return sorted(
        key
        for key in a.keys() | b.keys()
        if key not in a or key not in b or a[key].dtype != b[key].dtype or not torch.equal(a[key], b[key])
    )


def saved_state(checkpoint: Path) -> dict[str, Any]:
    """state.json: step, counters, the loader's cursor."""
    return json.loads((checkpoint / "state.json").read_text())


def metric_lines(run: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without the speed, which is of the machine; floats as Python reads them, so exact."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "tokens_per_s"} for line in lines]


def checkpoint_of(run: Path, step: int) -> Path:
    """The folder of one step's checkpoint."""
    return run / "checkpoints" / f"step-{step:08d}"
