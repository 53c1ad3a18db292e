"""Experts for the grouped tests: masters, routing and the quantised pair of weights."""

from __future__ import annotations

import torch
from torch import nn

from quaver.low_precision import LowPrecisionPolicy, MasterWeight, WeightSpec


def grouped_weight(
    master: torch.Tensor, bound: LowPrecisionPolicy, fqn: str, *, requires_grad: bool = True
) -> nn.Parameter:
    """A quantised weight [E, N, K]."""
    weight = nn.Parameter(
        MasterWeight(master.clone(), WeightSpec(fqn, "grouped", bound.recipe)), requires_grad=requires_grad
    )
    weight.refresh()
    return weight


def routing_of(counts: list[int], k: int = 1, *, seed: int = 0) -> torch.Tensor:
    """[T, k] expert indices with exactly counts[e] choices of each expert, shuffled; T k = sum(counts).

    A token may choose one expert twice, as far as the grouped GEMMs are concerned.
    """
    flat = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    order = torch.randperm(flat.numel(), generator=torch.Generator().manual_seed(seed))
    return flat[order].view(-1, k)
