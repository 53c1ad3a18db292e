"""Every GEMM that ATen runs, seen from below autograd, with the backend call that it belongs to."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from quaver.backends import GemmSite, Ledger

aten = torch.ops.aten
GEMM_OPS = {
    aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.addbmm, aten.mv, aten.addmv, aten.dot, aten.linear, aten.matmul,
    aten._grouped_mm, aten.convolution, torch.ops.mkldnn._linear_pointwise,
}  # fmt: skip


class GemmTrace(TorchDispatchMode):
    """Counts GEMMs by the site that was being computed; None: outside every backend call."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self.ledger = ledger
        self.seen: Counter[GemmSite | None] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Counts and passes on."""
        if func.overloadpacket in GEMM_OPS:
            self.seen[self.ledger.active] += 1
        return func(*args, **(kwargs or {}))
