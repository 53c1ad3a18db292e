"""torchao's emulated MXFP8, the peer that computes the same numbers; imported only where it is measured.

The one place of the package that knows a peer: nothing that trains imports it. May import: comparison.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from quaver.bench.comparison import Peer

VERSION = "0.18.0"  # the one of constraints.txt; its prototypes move from version to version


def _parts() -> SimpleNamespace:
    """All that is used of it."""
    from torchao.prototype.moe_training.mxfp8_grouped_mm import _to_mxfp8_then_scaled_grouped_mm
    from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    return SimpleNamespace(
        grouped_mm=_to_mxfp8_then_scaled_grouped_mm,
        linear=MXFP8Linear,
        choices={
            "kernel_preference": KernelPreference.EMULATED,
            "scale_calculation_mode": ScaleCalculationMode.FLOOR,
        },
    )


# without its dependencies, as `make setup` has it: they are not needed here, and would replace torch
PEER = Peer("torchao", f"pip install --no-deps torchao=={VERSION}", _parts)


def linear(weight: torch.Tensor) -> nn.Module:
    """MXFP8Linear with a BF16 weight [N, K], emulated, scale rule FLOOR."""
    torchao = _parts()
    outputs, inputs = weight.shape
    module: nn.Module = torchao.linear(inputs, outputs, bias=False, dtype=torch.bfloat16, **torchao.choices)
    with torch.no_grad():
        module.get_parameter("weight").copy_(weight)
    return module


class Experts(nn.Module):
    """SwiGLU experts over torchao's emulated grouped GEMM: tokens sorted by expert, then combined."""

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(gate_up.bfloat16())
        self.down_proj = nn.Parameter(down.bfloat16())

    def forward(self, x_TH: torch.Tensor, index_Tk: torch.Tensor, weight_Tk: torch.Tensor) -> torch.Tensor:
        """[T, H], [T, k], [T, k] -> [T, H]; every expert has a multiple of 32 rows."""
        T, k = index_Tk.shape
        flat = index_Tk.flatten()
        order = torch.argsort(flat, stable=True)
        ends = torch.bincount(flat, minlength=len(self.down_proj)).cumsum(0).to(torch.int32)
        h = _grouped(x_TH[order // k], self.gate_up_proj, ends)
        gate, up = h.chunk(2, -1)
        y = _grouped(F.silu(gate) * up, self.down_proj, ends)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        chosen = y[back].view(T, k, -1)
        return (chosen * weight_Tk.to(y.dtype).unsqueeze(-1)).sum(1)


def _grouped(x_SK: torch.Tensor, w_ENK: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    torchao = _parts()
    out: torch.Tensor = torchao.grouped_mm(
        x_SK, w_ENK.transpose(-2, -1), ends, out_dtype=torch.bfloat16, **torchao.choices
    )
    return out
