"""A reference backend that also writes down what it was asked, and what it answered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from quaver.backends import GemmSite, QuantizationRole, QuantizedOperand, ReferenceBackend


@dataclass(frozen=True)
class Quantised:
    """One call of quantize or quantize_dual."""

    role: QuantizationRole
    call: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Multiplied:
    """One GEMM: its operands and output, as they were."""

    site: GemmSite
    layout: str
    left: QuantizedOperand
    right: QuantizedOperand
    ends: list[int] | None
    out: torch.Tensor


class RecordingBackend(ReferenceBackend):
    """The reference backend with a diary."""

    def __init__(self) -> None:
        super().__init__()
        self.quantised: list[Quantised] = []
        self.multiplied: list[Multiplied] = []

    def weight_calls(self) -> list[Quantised]:
        """Quantisations with a weight role."""
        return [q for q in self.quantised if q.role.is_weight]

    def gemm(self, gemm: str, fqn: str | None = None) -> Multiplied:
        """The one recorded GEMM of a kind."""
        (found,) = [m for m in self.multiplied if m.site.gemm == gemm and fqn in (None, m.site.fqn)]
        return found

    def quantize(self, tensor: torch.Tensor, **kwargs: Any) -> QuantizedOperand:
        """As the base, noted."""
        self.quantised.append(Quantised(kwargs["role"], "quantize", tuple(tensor.shape)))
        return super().quantize(tensor, **kwargs)

    def quantize_dual(self, tensor: torch.Tensor, **kwargs: Any) -> tuple[QuantizedOperand, QuantizedOperand]:
        """As the base, noted."""
        self.quantised.append(Quantised(kwargs["role"], "quantize_dual", tuple(tensor.shape)))
        return super().quantize_dual(tensor, **kwargs)

    def low_precision_matmul(
        self, left: QuantizedOperand, right: QuantizedOperand, **kwargs: Any
    ) -> torch.Tensor:
        """As the base, noted."""
        out = super().low_precision_matmul(left, right, **kwargs)
        self.multiplied.append(Multiplied(kwargs["site"], kwargs["layout"], left, right, None, out))
        return out

    def low_precision_grouped_matmul(
        self, left: QuantizedOperand, right: QuantizedOperand, group_list: torch.Tensor, **kwargs: Any
    ) -> torch.Tensor:
        """As the base, noted."""
        out = super().low_precision_grouped_matmul(left, right, group_list, **kwargs)
        ends = group_list.tolist()
        self.multiplied.append(Multiplied(kwargs["site"], kwargs["layout"], left, right, ends, out))
        return out
