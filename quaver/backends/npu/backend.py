"""`NPUBackend`: the contract of backends on an Ascend 950, as thin calls of torch.ops.npu.

Operands keep the contract's layouts, so weights are gathered, saved and compared as on any backend; the NPU's own
layouts exist inside one call. Nothing is computed in another format, and a kernel's error is raised as it is, with a
note of where it was. May import: torch, config (types), contract, ledger, codecs, errors, and this folder.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from quaver.backends.codecs import MXFP8Codec
from quaver.backends.contract import (
    GemmSite,
    Layout,
    OperandError,
    Orientation,
    QuantizationRole,
    QuantizedOperand,
    ScalingSpec,
    check_group_list,
    check_layout,
    check_shapes,
)
from quaver.backends.ledger import Kind, Ledger
from quaver.backends.npu import gate, gemms, quantise
from quaver.backends.npu.device import DeviceFacts, probe
from quaver.backends.npu.tags import BLOCK, DENSE_KERNEL, GROUPED_KERNEL, MAX_GROUPS, NEEDS
from quaver.errors import CapabilityError

if TYPE_CHECKING:
    from quaver.config import LowPrecisionConfig

MXFP8, HIF8 = "mxfp8_e4m3", "hif8"


class NPUBackend:
    """Quantise and multiply on the NPU.

    Args:
        ledger: where GEMMs are recorded.
        device: what the gate believes of the device; None: this machine's own, asked when first needed.
    """

    name = "npu"

    def __init__(self, ledger: Ledger | None = None, device: DeviceFacts | None = None) -> None:
        self.ledger = ledger if ledger is not None else Ledger()
        self._device = device

    @property
    def device(self) -> DeviceFacts:
        """What the gate believes of the device."""
        if self._device is None:
            self._device = probe()
        return self._device

    @property
    def device_type(self) -> str:
        """torch's name of the device that tensors must live on."""
        return self.device.device_type

    def check_capability(self, config: LowPrecisionConfig) -> None:
        """CapabilityError unless this is an Ascend 950 with every operator and dtype tag of the recipe."""
        gate.check(self.device, config)

    # quantising --------------------------------------------------------------------------------------------

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
        """One orientation of a tensor; see `Backend.quantize`."""
        _check_amax(spec, amax)
        with _noted(f"quantising {tuple(tensor.shape)} {tensor.dtype} as {role}"):
            if spec.format == HIF8:
                codes, scale = self._hif8(tensor, spec, amax)
            elif group_list is not None and orientation == "col":
                codes, scale = quantise.mx_grouped_tokens(tensor, spec, group_list)
            else:
                codes, scale = quantise.mx_one_axis(tensor, spec, orientation)
        return QuantizedOperand(codes, scale, tensor.dtype, spec.format, orientation)

    def quantize_dual(
        self,
        tensor: torch.Tensor,
        *,
        spec: ScalingSpec,
        role: QuantizationRole,
        group_list: torch.Tensor | None = None,
        amax: torch.Tensor | None = None,
    ) -> tuple[QuantizedOperand, QuantizedOperand]:
        """(row, col) of one tensor; HiF8 has one storage for both."""
        _check_amax(spec, amax)
        if spec.format == HIF8 or group_list is not None:
            row = self.quantize(tensor, spec=spec, role=role, orientation="row", amax=amax)
            if spec.format == HIF8:
                return row, row.as_orientation("col")
            col = self.quantize(tensor, spec=spec, role=role, orientation="col", group_list=group_list)
            return row, col
        with _noted(f"quantising {tuple(tensor.shape)} {tensor.dtype} as {role}"):
            both = quantise.mx_both_axes(tensor, spec)
        (row_codes, row_scale), (col_codes, col_scale) = both
        return (
            QuantizedOperand(row_codes, row_scale, tensor.dtype, spec.format, "row"),
            QuantizedOperand(col_codes, col_scale, tensor.dtype, spec.format, "col"),
        )

    @staticmethod
    def _hif8(tensor: torch.Tensor, spec: ScalingSpec, amax: torch.Tensor | None) -> quantise.Coded:
        if amax is None:
            return quantise.hif8_current(tensor, spec)
        return quantise.hif8_given(tensor, spec, amax)

    def column_scales(
        self, tensor: torch.Tensor, *, spec: ScalingSpec, role: QuantizationRole, row0: int
    ) -> torch.Tensor:
        """See `Backend.column_scales`. No operator takes or gives scales of part of a block, so these few integer
        operations are torch's own, on the same device; once per refresh, for weights whose shards cut blocks."""
        return self._cut_blocks(spec).column_scales(tensor, spec, row0)

    def quantize_columns(
        self,
        tensor: torch.Tensor,
        scales: torch.Tensor,
        *,
        spec: ScalingSpec,
        role: QuantizationRole,
        row0: int,
    ) -> torch.Tensor:
        """See `Backend.quantize_columns` and `column_scales`."""
        return self._cut_blocks(spec).quantize_columns(tensor, scales, spec, row0)

    @staticmethod
    def _cut_blocks(spec: ScalingSpec) -> MXFP8Codec:
        if _known(spec.format) != MXFP8:
            raise CapabilityError(
                f"format {spec.format!r} has no blocks that a shard could cut", where="low_precision.format"
            )
        return MXFP8Codec()

    # multiplying -------------------------------------------------------------------------------------------

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
        matmul = gemms.mx_matmul if _known(left.format) == MXFP8 else gemms.hif8_matmul
        for operand in (left, right):
            _check_scale(operand, None, site)
        with self._kernel(site, "dense", left.format, DENSE_KERNEL):
            return matmul(left, right, layout, output_dtype)

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
        """One operator for all groups; see `Backend.low_precision_grouped_matmul`."""
        check_layout(left, right, layout, site)
        check_shapes(left, right, layout, site, output_dtype, grouped=True)
        ends = check_group_list(group_list, None if layout == "TN" else right.shape[0], left.shape[0], site)
        if len(ends) > MAX_GROUPS:
            raise OperandError(
                f"{len(ends)} groups; {GROUPED_KERNEL} takes at most {MAX_GROUPS}", where=f"{site.fqn} {site.gemm}"
            )
        tokens = ends if layout == "TN" else None
        _check_scale(left, tokens, site)
        _check_scale(right, tokens, site)
        with self._kernel(site, "grouped", left.format, GROUPED_KERNEL):
            if _known(left.format) == MXFP8:
                return gemms.mx_grouped_matmul(left, right, group_list, ends, layout, output_dtype)
            return gemms.hif8_grouped_matmul(left, right, group_list, layout, output_dtype)

    @contextmanager
    def _kernel(self, site: GemmSite, kind: Kind, format: str, kernel: str) -> Iterator[None]:
        """Records the GEMM; an error leaves with FQN and gemm noted, and is not counted."""
        with (
            _noted(f"{site.fqn} {site.gemm} ({format}, {kernel})"),
            self.ledger.record(site, kind=kind, format=format, kernel=kernel),
        ):
            yield


def _known(format: str) -> str:
    if format not in NEEDS:
        raise CapabilityError(
            f"backend npu has no kernels for format {format!r}",
            where="low_precision.format",
            remedy=f"use one of {sorted(NEEDS)}",
        )
    return format


def _check_amax(spec: ScalingSpec, amax: torch.Tensor | None) -> None:
    if _known(spec.format) == MXFP8 and amax is not None:
        raise ValueError("MXFP8 scales come from each block; amax cannot be given")


def _check_scale(operand: QuantizedOperand, ends: list[int] | None, site: GemmSite) -> None:
    """OperandError unless the scale belongs to the codes, in the contract's layout."""
    found, dtype = tuple(operand.scale.shape), torch.float32
    if operand.format == MXFP8:
        axis, dtype = operand.data.ndim - (1 if operand.orientation == "row" else 2), torch.uint8
        shape = list(operand.shape)
        lengths = [shape[axis]]
        if ends is not None and operand.orientation == "col":
            lengths = [end - start for start, end in zip([0, *ends], ends)]
        shape[axis] = sum(-(-length // BLOCK) for length in lengths)
        wanted = [tuple(shape)]
    else:
        wanted = [(), tuple(operand.shape[:1])] if operand.data.ndim == 3 else [()]
    if operand.scale.dtype is not dtype or found not in wanted:
        raise OperandError(
            f"the {operand.orientation} scale of {tuple(operand.shape)} codes is {operand.scale.dtype} {found},"
            f" {operand.format} wants {dtype} {' or '.join(map(str, wanted))}",
            where=f"{site.fqn} {site.gemm}",
            remedy="quantise it through the same backend",
        )


@contextmanager
def _noted(what: str) -> Iterator[None]:
    """An error raised inside is raised as it is, with a note of what was being done."""
    try:
        yield
    except Exception as error:
        error.add_note(f"in {what}")
        raise
