"""What the reference backend asks of a format: one codec a format, as data in a mapping.

A codec turns a tensor into (codes, scale) and back into *exact GEMM factors*: values that the GEMM multiplies
without any loss before its accumulation, and the factors (`alpha`) that belong behind it. A new format is one
more codec handed to `ReferenceBackend(codecs=...)`. May import: torch, contract, native, sources.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch

from quaver.backends.contract import Layout, Orientation, QuantizedOperand, ScalingSpec
from quaver.backends.native.kernels import Want
from quaver.backends.sources import RowSource


@dataclass(frozen=True)
class Factors:
    """One operand as the GEMM multiplies it.

    Args:
        values: BF16 where that is exact and safe, else FP32; the operand's own shape.
        alpha: None, or the FP32 scale(s) to apply behind the accumulation: 0-d, or [E].
    """

    values: torch.Tensor
    alpha: torch.Tensor | None


class Codec(Protocol):
    """Quantise and decode one format."""

    axis_free: bool  # one scale without an axis: both orientations share storage

    def quantize(
        self,
        tensor: torch.Tensor,
        spec: ScalingSpec,
        orientation: Orientation,
        group_list: torch.Tensor | None,
        amax: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(codes, scale) of a tensor; see `Backend.quantize`."""

    def misfit(self, operand: QuantizedOperand, ends: list[int] | None) -> str | None:
        """Why an operand's scale does not belong to its codes, in one sentence; None where it does.

        `ends`: of a token axis that is contracted group by group.
        """

    def factors(
        self, operand: QuantizedOperand, dtype: torch.dtype, group_list: torch.Tensor | None = None
    ) -> Factors:
        """Exact GEMM factors; `dtype` BF16 is a wish that an operand may refuse by answering FP32."""


@runtime_checkable
class BlockCodec(Protocol):
    """What a codec with blocks along the rows offers besides, for weights whose shards cut blocks."""

    def column_scales(self, tensor: torch.Tensor, spec: ScalingSpec, row0: int) -> torch.Tensor:
        """Scale bytes of the touched blocks."""

    def quantize_columns(
        self, tensor: torch.Tensor, scales: torch.Tensor, spec: ScalingSpec, row0: int
    ) -> torch.Tensor:
        """Codes under given scale bytes."""


class Sides(NamedTuple):
    """What is wanted of each direction; None: nothing."""

    row: Want | None
    col: Want | None


class Coded(NamedTuple):
    """One direction of a tensor: codes, scale, and the codes' BF16 values; None what was not wanted.

    Codes are there wherever the values are not: unwanted, or not to be had without a loss.
    """

    codes: torch.Tensor | None
    scale: torch.Tensor
    values: torch.Tensor | None


@runtime_checkable
class KernelCodec(Protocol):
    """What a codec offers besides that has kernels: both directions in one read, and values in the same pass."""

    axis_free: bool

    def code_sides(
        self,
        tensor: torch.Tensor | RowSource,
        spec: ScalingSpec,
        sides: Sides,
        group_list: torch.Tensor | None,
        amax: torch.Tensor | None,
    ) -> tuple[Coded | None, Coded | None] | None:
        """(row, col) as wanted, bit-equal to `Codec.quantize`; None where no kernel takes this tensor."""

    def codes_of(
        self, values: torch.Tensor, scale: torch.Tensor, orientation: Orientation, group_list: torch.Tensor | None
    ) -> torch.Tensor:
        """The codes that values made by `code_sides` stand for."""

    def pack(self, weight: QuantizedOperand, layout: Layout, expert: int | None = None) -> torch.Tensor | None:
        """A weight (one expert's, if named) decoded into the order in which `packing.linear` multiplies it.

        None where it has no such order, or where its exact factors are not BF16 without an alpha.
        """

    def turned(self, weight: QuantizedOperand) -> Factors | None:
        """Exact BF16 factors of a dense weight, column by column in memory, where NN products are faster so."""



def scale_misfit(
    operand: QuantizedOperand, dtype: torch.dtype, shapes: Sequence[tuple[int, ...]]
) -> str | None:
    """Why a scale of this dtype and shape does not belong to the operand; None where it does."""
    found, scale = tuple(operand.scale.shape), operand.scale
    if scale.dtype is dtype and found in [tuple(shape) for shape in shapes]:
        return None
    return (
        f"the {operand.orientation} scale of {tuple(operand.shape)} codes is {scale.dtype} {found},"
        f" {operand.format} wants {dtype} {' or '.join(str(tuple(shape)) for shape in shapes)}"
    )
