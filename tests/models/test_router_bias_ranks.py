"""Router counts summed over two processes, in a file of its own: its workers need no transformers."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from quaver.models.router_bias import RouterBias


class Router(nn.Module):
    def __init__(self, plan: list[list[int]]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 2))
        self.e_score_correction_bias = nn.Buffer(torch.zeros(4))
        self.plan = plan

    def forward(self, x_TH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return x_TH @ self.weight.T, torch.ones(len(self.plan), 2), torch.tensor(self.plan)


class Layer(nn.Module):
    def __init__(self, plan: list[list[int]]) -> None:
        super().__init__()
        self.gate = Router(plan)
        self.experts = nn.Linear(2, 2)

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        return self.experts(x_TH) + self.gate(x_TH)[0].sum()


def _rank(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    alone = dist.new_subgroups(1)[0]
    for name, group in (("default", None), ("world", dist.group.WORLD), ("alone", alone)):
        layer = Layer([[0, 1], [0, 1]] if rank == 0 else [[1, 2], [1, 1]])
        router = RouterBias(nn.Sequential(layer), group)
        layer(torch.ones(2, 2)).sum().backward()
        (load,) = router.update(0.5)
        result = {"counts": load.counts, "bias": layer.gate.e_score_correction_bias.tolist()}
        Path(folder, f"{name}-{rank}.json").write_text(json.dumps(result))
        router.close()
    del group, alone
    dist.destroy_process_group()


def test_ranks_sum_their_counts_and_move_alike(tmp_path: Path) -> None:
    """Counts (2, 2, 0, 0) and (0, 3, 1, 0): together (2, 5, 1, 0), mean 2."""
    torch.multiprocessing.spawn(_rank, args=(str(tmp_path),), nprocs=2)
    both = {"counts": [2, 5, 1, 0], "bias": [0.0, -0.5, 0.5, 0.5]}
    apart = [
        {"counts": [2, 2, 0, 0], "bias": [-0.5, -0.5, 0.5, 0.5]},
        {"counts": [0, 3, 1, 0], "bias": [0.5, -0.5, 0.0, 0.5]},
    ]
    for rank in range(2):
        got = {
            name: json.loads((tmp_path / f"{name}-{rank}.json").read_text())
            for name in ("default", "world", "alone")
        }
        assert got == {"default": both, "world": both, "alone": apart[rank]}
