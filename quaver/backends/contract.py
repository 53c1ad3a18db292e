"""What a backend is: operands, roles, GEMM sites and the protocol that every backend implements.

The words: a *role* is what is quantised (an input, a weight, a gradient), a *gemm* is what is computed
(fprop, dgrad, wgrad), an *orientation* says along which axis of `data` the scale blocks run. The one
invariant of eight-bit GEMMs stands here too: blocks run along the axis that the GEMM contracts.
May import: torch, errors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, Protocol

import torch

from quaver.errors import QuaverError

if TYPE_CHECKING:
    from quaver.backends.ledger import Ledger
    from quaver.config import LowPrecisionConfig

Orientation = Literal["row", "col"]
Layout = Literal["NN", "NT", "TN"]
Gemm = Literal["fprop", "dgrad", "wgrad"]
GEMMS: tuple[Gemm, ...] = ("fprop", "dgrad", "wgrad")

# layout -> orientation that (left, right) must have, so that blocks run along the contracted axis.
# N: the matrix as it stands, T: transposed. `row` blocks run along the last axis, `col` along the one before.
CONTRACTED: dict[Layout, tuple[Orientation, Orientation]] = {
    "NN": ("row", "col"),  # [T,K] x [K,N]
    "NT": ("row", "row"),  # [T,K] x [N,K]^T
    "TN": ("col", "col"),  # [T,N]^T x [T,K]
}


class QuantizationRole(StrEnum):
    """What is quantised; decides format maximum and scaling, never the layout."""

    INPUT_FWD = "input_fwd"
    WEIGHT_FWD = "weight_fwd"
    GRAD_OUTPUT = "grad_output"
    INPUT_BWD = "input_bwd"
    WEIGHT_BWD = "weight_bwd"

    @property
    def is_weight(self) -> bool:
        """True for the two roles of a persistent weight."""
        return self in (QuantizationRole.WEIGHT_FWD, QuantizationRole.WEIGHT_BWD)


@dataclass(frozen=True)
class GemmSite:
    """Where a GEMM belongs: the module's FQN (grouped: the parameter's) and which of the three it is."""

    fqn: str
    gemm: Gemm

    def __post_init__(self) -> None:
        if self.gemm not in GEMMS:
            raise OperandError(
                f"gemm {self.gemm!r} is not one of {', '.join(GEMMS)}", where=self.fqn, remedy="name the GEMM"
            )


class OperandError(QuaverError, ValueError):
    """Operands whose shapes, dtypes, formats or orientations cannot enter one GEMM."""


@dataclass(frozen=True)
class ScalingSpec:
    """How one role of one recipe is scaled: pure data that each backend translates for its kernels.

    Args:
        format: element format, e.g. "mxfp8_e4m3" or "hif8".
        block: elements per scale along the contracted axis; None: one scale per tensor, or per leading
            index of a 3-D weight.
        scale_rule: "floor" or "rceil" for block formats.
        format_max: value onto which amax is mapped, for per-tensor formats (HiF8: 15 or 224).
    """

    format: str
    block: int | None = None
    scale_rule: str | None = None
    format_max: float | None = None


@dataclass(frozen=True)
class QuantizedOperand:
    """One quantised input of a matmul; short-lived, never gathered, never saved.

    Args:
        data: uint8 codes, [M, K] (dense) or [E, K, N] (grouped weight as the grouped GEMM sees it).
        scale: MXFP8: uint8 E8M0 bytes, the blocked axis shortened to ceil(n/32) (grouped along tokens:
            the sum of ceil(n_e/32)); HiF8: FP32, 0-d or [E]; it is the *dequantisation* scale.
        logical_dtype: dtype of the tensor that was quantised, or BF16 for weights.
        format: format name, as in `ScalingSpec.format`.
        orientation: "row": blocks run along the last axis of `data`, "col": along the axis before.
        values: None, or what `data` decodes to in BF16 (without a scale that has no axis), where the quantiser has
            made it in the same pass and it loses nothing; the GEMM then need not decode.
    """

    data: torch.Tensor
    scale: torch.Tensor
    logical_dtype: torch.dtype
    format: str
    orientation: Orientation
    values: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if self.orientation not in ("row", "col"):
            raise OperandError(f"orientation {self.orientation!r} is neither row nor col")
        if self.data.dtype is not torch.uint8:
            raise OperandError(f"operand data is {self.data.dtype}, codes are torch.uint8")
        if self.data.ndim not in (2, 3):
            raise OperandError(f"operand data of shape {tuple(self.data.shape)}; GEMMs take 2-D or 3-D codes")

    @property
    def shape(self) -> torch.Size:
        """Shape of the codes."""
        return self.data.shape

    def as_orientation(self, orientation: Orientation) -> QuantizedOperand:
        """The same storage under another orientation; only for formats whose scale has no axis."""
        if self.scale.dtype is not torch.float32:
            raise OperandError(f"{self.format} scales have an axis; quantise again for {orientation!r}")
        return replace(self, orientation=orientation)


class UncodedOperand(QuantizedOperand):
    """An operand whose BF16 values are there and whose codes are written only if somebody reads `data`.

    A gradient is multiplied and forgotten: its values are all that the GEMMs of a CPU need. `data` may be a function
    that gives the codes from the values, exactly.
    """

    _codes: torch.Tensor | Callable[[], torch.Tensor]

    def __init__(
        self,
        data: torch.Tensor | Callable[[], torch.Tensor],
        scale: torch.Tensor,
        logical_dtype: torch.dtype,
        format: str,
        orientation: Orientation,
        values: torch.Tensor,
    ) -> None:
        given = {"scale": scale, "logical_dtype": logical_dtype, "format": format, "values": values}
        for name, value in {**given, "orientation": orientation, "_codes": data}.items():
            object.__setattr__(self, name, value)

    @property
    def data(self) -> torch.Tensor:
        """The codes, written now if they were not."""
        codes = self._codes
        if not isinstance(codes, torch.Tensor):
            codes = codes()
            object.__setattr__(self, "_codes", codes)
        return codes

    @property
    def shape(self) -> torch.Size:
        """Shape of the codes, without writing them."""
        assert self.values is not None  # given at the start
        return self.values.shape


class Backend(Protocol):
    """Quantise and multiply. Chosen once by `low_precision.backend`; kernels' errors are raised unchanged."""

    name: str
    ledger: Ledger

    # A backend with `takes_sources = True` also quantises a `RowSource` in place of a tensor; for the others the
    # experts compute the tensor first.

    @property
    def device_type(self) -> str | None:
        """torch's name of the one kind of device that it computes on; None: any."""

    def check_capability(self, config: LowPrecisionConfig) -> None:
        """Raises CapabilityError (device, op, version, remedy) where this machine cannot run the recipe."""

    def quantize(
        self,
        tensor: torch.Tensor,
        *,
        spec: ScalingSpec,
        role: QuantizationRole,
        orientation: Orientation,
        group_list: torch.Tensor | None = None,
        amax: torch.Tensor | None = None,
    ) -> QuantizedOperand:
        """Quantise [M, K] or [E, A, B]; with `group_list` ([E] int64 cumulative ends) blocks of a `col`
        operand restart at each group. `amax` overrides the tensor's own (per-tensor formats)."""

    def quantize_dual(
        self,
        tensor: torch.Tensor,
        *,
        spec: ScalingSpec,
        role: QuantizationRole,
        group_list: torch.Tensor | None = None,
        amax: torch.Tensor | None = None,
    ) -> tuple[QuantizedOperand, QuantizedOperand]:
        """Both orientations of one tensor, (row, col); formats without an axis share one storage."""

    def column_scales(
        self, tensor: torch.Tensor, *, spec: ScalingSpec, role: QuantizationRole, row0: int
    ) -> torch.Tensor:
        """uint8 scale bytes of the `col` blocks that rows [row0, row0 + M) of a larger matrix touch, from these
        rows alone: [touched blocks, K]. Their maximum over all shards is the scale of the whole block."""

    def quantize_columns(
        self,
        tensor: torch.Tensor,
        scales: torch.Tensor,
        *,
        spec: ScalingSpec,
        role: QuantizationRole,
        row0: int,
    ) -> torch.Tensor:
        """uint8 codes [M, K] of these rows under given scale bytes of the touched `col` blocks."""

    def low_precision_matmul(
        self,
        left: QuantizedOperand,
        right: QuantizedOperand,
        *,
        layout: Layout,
        output_dtype: torch.dtype,
        site: GemmSite,
    ) -> torch.Tensor:
        """2-D x 2-D under `layout`; accumulates in FP32 and rounds once to `output_dtype`."""

    def low_precision_grouped_matmul(
        self,
        left: QuantizedOperand,
        right: QuantizedOperand,
        group_list: torch.Tensor,
        *,
        layout: Layout,
        output_dtype: torch.dtype,
        site: GemmSite,
    ) -> torch.Tensor:
        """Tokens sorted by expert. NN: [S,K] x [E,K,N] -> [S,N]; NT: [S,N] x [E,K,N] -> [S,K];
        TN: [S,N]^T x [S,K] -> [E,N,K]. `group_list`: [E] int64 cumulative ends."""


def check_layout(left: QuantizedOperand, right: QuantizedOperand, layout: Layout, site: GemmSite) -> None:
    """Formats agree and blocks run along the contracted axis, else OperandError with FQN and gemm."""
    where = f"{site.fqn} {site.gemm} ({layout})"
    if layout not in CONTRACTED:
        raise OperandError(f"layout {layout!r} is not one of NN, NT, TN", where=where)
    if left.format != right.format:
        raise OperandError(f"operands of two formats, {left.format} and {right.format}", where=where)
    wanted = CONTRACTED[layout]
    if (left.orientation, right.orientation) != wanted:
        raise OperandError(
            f"orientations {left.orientation}, {right.orientation}: blocks do not run along the contraction",
            where=where,
            remedy=f"{layout} takes {wanted[0]}, {wanted[1]}",
        )


def check_shapes(
    left: QuantizedOperand,
    right: QuantizedOperand,
    layout: Layout,
    site: GemmSite,
    output_dtype: torch.dtype,
    *,
    grouped: bool = False,
) -> None:
    """Dimensions, contracted lengths and output dtype fit, else OperandError with FQN and gemm.

    Dense operands are 2-D; so are grouped ones, but for the weight [E, K, N] under NN and NT. Outputs
    are BF16 or FP32.
    """
    where = f"{site.fqn} {site.gemm} ({layout})"
    wanted = (2, 3 if grouped and layout != "TN" else 2)
    if (len(left.shape), len(right.shape)) != wanted:
        raise OperandError(
            f"operands of shapes {tuple(left.shape)} and {tuple(right.shape)}, wanted 2-D and {wanted[1]}-D",
            where=where,
        )
    inner = (left.shape[0 if layout[0] == "T" else 1], right.shape[-1 if layout[1] == "T" else -2])
    if inner[0] != inner[1]:
        raise OperandError(
            f"contracted lengths {inner[0]} and {inner[1]} differ: {tuple(left.shape)}, {tuple(right.shape)}",
            where=where,
        )
    if output_dtype not in (torch.bfloat16, torch.float32):
        raise OperandError(f"output dtype {output_dtype} is neither BF16 nor FP32", where=where)


def check_group_list(group_list: torch.Tensor, groups: int | None, rows: int, site: GemmSite) -> list[int]:
    """The ends as a list: int64, cumulative, non-decreasing, the last equal to the number of rows."""
    where = f"{site.fqn} {site.gemm}"
    if group_list.dtype is not torch.int64 or group_list.ndim != 1:
        raise OperandError(
            f"group_list is {group_list.dtype} {tuple(group_list.shape)}, wanted int64 [E] cumulative ends",
            where=where,
        )
    if groups is not None and group_list.numel() != groups:
        raise OperandError(f"group_list has {group_list.numel()} groups, the weight {groups}", where=where)
    ends: list[int] = group_list.tolist()
    fits = ends[-1] == rows and ends[0] >= 0 if ends else rows == 0
    if not fits or any(a > b for a, b in pairwise(ends)):
        raise OperandError(f"group_list {ends} does not ascend to the {rows} rows", where=where)
    return ends
