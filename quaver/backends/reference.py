"""The reference backend: exact codecs and exact GEMM factors in plain torch, on any torch device.

Operands are decoded to values that lose nothing (BF16 where every value is a normal BF16 number, else FP32),
multiplied with FP32 accumulation and rounded once. So its numbers are what the eight-bit hardware's contract
says, and a laptop's CPU computes them. May import: torch, errors, config, contract, codecs, ledger.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, TypeGuard

import torch

from quaver.backends.codecs import BUILTIN_CODECS, BlockCodec, Codec, Coded, Factors, KernelCodec, Sides
from quaver.backends.contract import (
    GemmSite,
    Layout,
    OperandError,
    Orientation,
    QuantizationRole,
    QuantizedOperand,
    ScalingSpec,
    UncodedOperand,
    check_group_list,
    check_layout,
    check_shapes,
)
from quaver.backends.ledger import Ledger
from quaver.backends.native import packing
from quaver.backends.native.kernels import Want
from quaver.backends.products import multiply, multiply_rows, multiply_tokens, product
from quaver.backends.sources import RowSource, as_tensor
from quaver.errors import CapabilityError

if TYPE_CHECKING:
    from quaver.config import LowPrecisionConfig

DENSE_KERNEL = "reference_matmul"
GROUPED_KERNEL = "reference_grouped_matmul"


class ReferenceBackend:
    """Quantise and multiply by the book; `codecs` maps format names to how they are coded."""

    name = "reference"
    takes_sources = True  # quantises what is not there yet: see sources.py

    def __init__(self, ledger: Ledger | None = None, codecs: Mapping[str, Codec] = BUILTIN_CODECS) -> None:
        self.ledger = ledger if ledger is not None else Ledger()
        self.codecs = dict(codecs)

    def codec(self, format: str) -> Codec:
        """The codec of a format, or CapabilityError."""
        if format not in self.codecs:
            raise CapabilityError(
                f"the reference backend has no codec for format {format!r}",
                where="low_precision.format",
                remedy=f"use one of {sorted(self.codecs)}, or hand a codec to ReferenceBackend(codecs=...)",
            )
        return self.codecs[format]

    @property
    def device_type(self) -> str | None:
        """None: it computes on any device."""
        return None

    def check_capability(self, config: LowPrecisionConfig) -> None:
        """The reference backend runs everywhere; only the format must be known to it."""
        self.codec(config.format)

    def quantize(
        self,
        tensor: torch.Tensor | RowSource,
        *,
        spec: ScalingSpec,
        role: QuantizationRole,
        orientation: Orientation,
        group_list: torch.Tensor | None = None,
        amax: torch.Tensor | None = None,
    ) -> QuantizedOperand:
        """One orientation of a tensor; see `Backend.quantize`."""
        codec = self.codec(spec.format)
        if has_kernels(codec):
            row, col = wanted(role, tensor.dtype, codec.axis_free)
            sides = Sides(row, None) if orientation == "row" else Sides(None, col)
            for coded in codec.code_sides(tensor, spec, sides, group_list, amax) or ():
                if coded is not None:
                    return _operand(codec, coded, tensor.dtype, spec, orientation, group_list)
        tensor = as_tensor(tensor)
        codes, scale = codec.quantize(tensor, spec, orientation, group_list, amax)
        return QuantizedOperand(codes, scale, tensor.dtype, spec.format, orientation)

    def quantize_dual(
        self,
        tensor: torch.Tensor | RowSource,
        *,
        spec: ScalingSpec,
        role: QuantizationRole,
        group_list: torch.Tensor | None = None,
        amax: torch.Tensor | None = None,
    ) -> tuple[QuantizedOperand, QuantizedOperand]:
        """(row, col) of one tensor; formats without an axis are quantised once and share storage."""
        codec = self.codec(spec.format)
        if has_kernels(codec):
            sides = wanted(role, tensor.dtype, codec.axis_free)
            both = codec.code_sides(tensor, spec, sides, group_list, amax)
            if both is not None and both[0] is not None and both[1] is not None:
                dtype = tensor.dtype
                return (
                    _operand(codec, both[0], dtype, spec, "row", None),
                    _operand(codec, both[1], dtype, spec, "col", group_list),
                )
        tensor = as_tensor(tensor)
        codes, scale = codec.quantize(tensor, spec, "row", group_list, amax)
        row = QuantizedOperand(codes, scale, tensor.dtype, spec.format, "row")
        if codec.axis_free:
            return row, row.as_orientation("col")
        codes, scale = codec.quantize(tensor, spec, "col", group_list, amax)
        return row, QuantizedOperand(codes, scale, tensor.dtype, spec.format, "col")

    def column_scales(
        self, tensor: torch.Tensor, *, spec: ScalingSpec, role: QuantizationRole, row0: int
    ) -> torch.Tensor:
        """See `Backend.column_scales`; block formats only."""
        return self._block_codec(spec).column_scales(tensor, spec, row0)

    def quantize_columns(
        self,
        tensor: torch.Tensor,
        scales: torch.Tensor,
        *,
        spec: ScalingSpec,
        role: QuantizationRole,
        row0: int,
    ) -> torch.Tensor:
        """See `Backend.quantize_columns`; block formats only."""
        return self._block_codec(spec).quantize_columns(tensor, scales, spec, row0)

    def _block_codec(self, spec: ScalingSpec) -> BlockCodec:
        codec = self.codec(spec.format)
        if not isinstance(codec, BlockCodec):
            raise CapabilityError(
                f"format {spec.format!r} has no blocks that a shard could cut", where="low_precision.format"
            )
        return codec

    def low_precision_matmul(
        self,
        left: QuantizedOperand,
        right: QuantizedOperand,
        *,
        layout: Layout,
        output_dtype: torch.dtype,
        site: GemmSite,
    ) -> torch.Tensor:
        """NN: [T,N]x[N,K]; NT: [T,K]x[N,K]^T; TN: [T,N]^Tx[T,K]. Raises OperandError on a misfit."""
        check_layout(left, right, layout, site)
        check_shapes(left, right, layout, site, output_dtype)
        codec = self.codec(left.format)
        _check_scales(codec, left, None, site)
        _check_scales(codec, right, None, site)
        wish = torch.bfloat16 if output_dtype is torch.bfloat16 else torch.float32
        with self.ledger.record(site, kind="dense", format=left.format, kernel=DENSE_KERNEL):
            a = codec.factors(left, wish)
            packed = self._packed(codec, a, right, layout)
            if packed is not None:
                return packing.linear(a.values, packed)
            b = self._turned(codec, right, layout, wish) or codec.factors(right, wish)
            a_mat = a.values.t() if layout[0] == "T" else a.values
            b_mat = b.values.t() if layout[1] == "T" else b.values
            return multiply(a_mat, b_mat, product(a.alpha, b.alpha), output_dtype)

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
        """One GEMM a non-empty group; a group without tokens adds no rows, and zeros under TN."""
        check_layout(left, right, layout, site)
        check_shapes(left, right, layout, site, output_dtype, grouped=True)
        ends = check_group_list(group_list, None if layout == "TN" else right.shape[0], left.shape[0], site)
        codec = self.codec(left.format)
        _check_scales(codec, left, ends, site)
        _check_scales(codec, right, ends if layout == "TN" else None, site)
        wish = torch.bfloat16 if output_dtype is torch.bfloat16 else torch.float32
        with self.ledger.record(site, kind="grouped", format=left.format, kernel=GROUPED_KERNEL):
            a = codec.factors(left, wish, group_list)
            out = self._packed_groups(codec, a, right, ends, layout)
            if out is not None:
                return out
            b = codec.factors(right, wish, group_list if layout == "TN" else None)
            alphas = (a.alpha, b.alpha)
            if layout == "TN":
                return multiply_tokens(a.values, b.values, ends, alphas, output_dtype)
            b_values = b.values if layout == "NN" else b.values.mT
            return multiply_rows(a.values, b_values, ends, alphas, output_dtype)

    @staticmethod
    def _packed(
        codec: Codec, a: Factors, right: QuantizedOperand, layout: Layout, expert: int | None = None
    ) -> torch.Tensor | None:
        """The weight packed for a BF16 product; None where the plain product is to be taken."""
        if layout == "TN" or a.values.dtype is not torch.bfloat16 or a.alpha is not None:
            return None
        return codec.pack(right, layout, expert) if has_kernels(codec) else None

    @staticmethod
    def _turned(codec: Codec, right: QuantizedOperand, layout: Layout, wish: torch.dtype) -> Factors | None:
        """The weight of an NN product in the order of memory that oneDNN multiplies faster, to the same bits."""
        fits = layout == "NN" and wish is torch.bfloat16
        return codec.turned(right) if fits and has_kernels(codec) else None

    def _packed_groups(
        self, codec: Codec, a: Factors, right: QuantizedOperand, ends: list[int], layout: Layout
    ) -> torch.Tensor | None:
        """The grouped product expert by expert; None if any expert's weight is to be multiplied otherwise.

        Experts without tokens are decoded too: one that BF16 cannot hold puts the whole weight on the FP32 path.
        """
        if layout == "TN" or not ends:
            return None
        inner, features = right.shape[1:] if layout == "NN" else (right.shape[2], right.shape[1])
        if not packing.pays(a.values.shape[0] // len(ends), inner, features):
            return None
        out = a.values.new_empty((a.values.shape[0], features))
        start = 0
        for expert, end in enumerate(ends):
            packed = self._packed(codec, a, right, layout, expert)
            if packed is None:
                return None
            if end > start:
                out[start:end] = packing.linear(a.values[start:end], packed)
            start = end
        return out


_HAS_KERNELS: dict[type, bool] = {}


def has_kernels(codec: Codec) -> TypeGuard[KernelCodec]:
    """isinstance(codec, KernelCodec), asked once a class: a protocol's check looks at every method each time."""
    kind = type(codec)
    if kind not in _HAS_KERNELS:
        _HAS_KERNELS[kind] = isinstance(codec, KernelCodec)
    return _HAS_KERNELS[kind]


def wanted(role: QuantizationRole, dtype: torch.dtype, axis_free: bool) -> Sides:
    """What the coming GEMMs will need of each direction, so that it is made while the tensor is being read.

    A gradient enters dgrad by row and wgrad by col and is forgotten: its BF16 values do. An input enters fprop by
    row, while its col side is kept in eight bits until the backward pass: codes (which a format without an axis keeps
    of its one copy). Weights are decoded once they are multiplied, and FP32 factors never need BF16.
    """
    if dtype is not torch.bfloat16:
        return Sides(Want.CODES, Want.CODES)
    if role is QuantizationRole.GRAD_OUTPUT:
        return Sides(Want.VALUES, Want.VALUES)
    if role is QuantizationRole.INPUT_FWD:
        return Sides(Want.BOTH if axis_free else Want.VALUES, Want.CODES)
    return Sides(Want.CODES, Want.CODES)


def _operand(
    codec: KernelCodec,
    coded: Coded,
    dtype: torch.dtype,
    spec: ScalingSpec,
    orientation: Orientation,
    group_list: torch.Tensor | None,
) -> QuantizedOperand:
    codes, scale, values = coded
    if codes is not None:
        return QuantizedOperand(codes, scale, dtype, spec.format, orientation, values)
    assert values is not None  # one of the two is always made
    codes_of = partial(codec.codes_of, values, scale, orientation, group_list)
    return UncodedOperand(codes_of, scale, dtype, spec.format, orientation, values)


def _check_scales(codec: Codec, operand: QuantizedOperand, ends: list[int] | None, site: GemmSite) -> None:
    misfit = codec.misfit(operand, ends)
    if misfit is not None:
        where = f"{site.fqn} {site.gemm}"
        raise OperandError(misfit, where=where, remedy="quantise it through the same backend")
