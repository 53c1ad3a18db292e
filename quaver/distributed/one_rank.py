"""The reduction of gradients on one rank, where there is nothing to reduce: the gathered gradients stay where they are.

FSDP2 gathers a unit's gradients into one FP32 buffer, and on one rank divides that by the factor into a second and
copies it into a third; for a large unit each is a pass over as many bytes as the masters have. Without a factor
and with the first buffer as the last, the numbers are the same and both passes are gone. May import: torch.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter


class InPlaceReduceScatter(ReduceScatter):
    """Hands out one buffer as input and, once it is filled, as output of the same reduction.

    torch asks for the input, fills it, asks for the output and copies the one into the other, which for one and
    the same tensor does nothing. A buffer that was never filled belongs to a reduction that failed, and is not
    handed out again.
    """

    def __init__(self) -> None:
        self._input: weakref.ref[torch.Tensor] | None = None
        self._unfilled = 0

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The buffer of a reduction: the first call makes it, the second returns it."""
        held = self._input() if self._input is not None else None
        self._input = None
        if held is not None and held._version > self._unfilled:
            if (held.shape, held.dtype, held.device) != (torch.Size(size), dtype, device):
                raise AssertionError(f"input {tuple(held.shape)} {held.dtype}, output {tuple(size)} {dtype}")
            return held
        made = torch.empty(size, dtype=dtype, device=device)
        self._input, self._unfilled = weakref.ref(made), made._version
        return made

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Never called on one rank."""
        raise AssertionError("one rank has nothing to reduce")
