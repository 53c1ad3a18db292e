"""`CUDABackend`: MXFP8 products of Blackwell GPUs through torch's scaled_mm and scaled_grouped_mm.

Quantising is the reference backend's, which gives the CPU's codes bit for bit on any device; products are those of the
tensor cores. May import: torch, config (types), contract, ledger, reference, errors, and this folder.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from quaver.backends.contract import (
    GemmSite,
    Layout,
    OperandError,
    QuantizedOperand,
    check_group_list,
    check_layout,
    check_shapes,
)
from quaver.backends.cuda import device, operands, swizzle
from quaver.backends.cuda.device import CudaFacts
from quaver.backends.ledger import Kind, Ledger
from quaver.backends.reference import ReferenceBackend

if TYPE_CHECKING:
    from quaver.config import LowPrecisionConfig

DENSE_KERNEL, GROUPED_KERNEL = device.FUNCTIONS


class CUDABackend(ReferenceBackend):
    """Quantise by the book, multiply on the tensor cores.

    Args:
        ledger: where GEMMs are recorded.
        facts: what the gate believes of the device; None: this machine's own, asked when first needed.
    """

    name = "cuda"

    def __init__(self, ledger: Ledger | None = None, facts: CudaFacts | None = None) -> None:
        super().__init__(ledger)
        self._facts = facts

    @property
    def facts(self) -> CudaFacts:
        """What the gate believes of the device."""
        if self._facts is None:
            self._facts = device.probe()
        return self._facts

    @property
    def device_type(self) -> str:
        """torch's name of the device that tensors must live on."""
        return self.facts.device_type

    def check_capability(self, config: LowPrecisionConfig) -> None:
        """CapabilityError unless this is a GPU of compute capability 10.x and the recipe is MXFP8."""
        device.check(self.facts, config)

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
        for operand in (left, right):
            self._check_scale(operand, None, site)
        with self._kernel(site, "dense", left.format, DENSE_KERNEL):
            a = operands.contiguous_along(left, transposed=layout[0] == "T")
            b = operands.with_lanes(operands.contiguous_along(right, transposed=layout[1] == "N"))
            out = F.scaled_mm(
                a.codes.view(torch.float8_e4m3fn),
                b.codes.view(torch.float8_e4m3fn).t(),
                _e8m0(swizzle.tiled(a.scale)),
                F.ScalingType.BlockWise1x32,
                _e8m0(swizzle.tiled(b.scale)),
                F.ScalingType.BlockWise1x32,
                F.SwizzleType.SWIZZLE_32_4_4,
                F.SwizzleType.SWIZZLE_32_4_4,
                output_dtype=output_dtype,
            )
            return out[:, : right.shape[0 if layout[1] == "T" else 1]].contiguous()

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
        """One kernel for all groups; an expert without tokens has a weight gradient of zeros."""
        check_layout(left, right, layout, site)
        check_shapes(left, right, layout, site, output_dtype, grouped=True)
        ends = check_group_list(group_list, None if layout == "TN" else right.shape[0], left.shape[0], site)
        where = f"{site.fqn} {site.gemm}"
        if output_dtype is not torch.bfloat16:
            raise OperandError(
                f"{GROUPED_KERNEL} gives BF16, {output_dtype} was wanted", where=where, remedy="run the experts in BF16"
            )
        self._check_scale(left, ends if layout == "TN" else None, site)
        self._check_scale(right, ends if layout == "TN" else None, site)
        with self._kernel(site, "grouped", left.format, GROUPED_KERNEL):
            if layout == "TN":
                return _weight_gradient(left, right, ends, group_list)
            a = operands.contiguous_along(left, transposed=False)
            b = operands.with_lanes(operands.contiguous_along(right, transposed=layout == "NN"))
            scales = swizzle.tiled_row_groups(a.scale, ends), swizzle.tiled_experts(b.scale)
            out = _grouped(a.codes, b.codes.transpose(-1, -2), *scales, group_list.to(torch.int32))
            return out[:, : right.shape[2 if layout == "NN" else 1]].contiguous()

    def _check_scale(self, operand: QuantizedOperand, ends: list[int] | None, site: GemmSite) -> None:
        misfit = self.codec(operand.format).misfit(operand, ends)
        if misfit is not None:
            where = f"{site.fqn} {site.gemm}"
            raise OperandError(misfit, where=where, remedy="quantise it through the same backend")

    @contextmanager
    def _kernel(self, site: GemmSite, kind: Kind, format: str, kernel: str) -> Iterator[None]:
        """Records the GEMM; an error leaves as it is, with FQN and gemm noted, and is not counted."""
        try:
            with self.ledger.record(site, kind=kind, format=format, kernel=kernel):
                yield
        except Exception as error:
            error.add_note(f"in {site.fqn} {site.gemm} ({format}, {kernel})")
            raise


def _weight_gradient(
    left: QuantizedOperand, right: QuantizedOperand, ends: list[int], group_list: torch.Tensor
) -> torch.Tensor:
    """[E, N, K] of g [S, N] and x [S, K], the tokens of each group contracted."""
    tokens, blocks = operands.padded_ends(ends)
    columns = right.shape[1]
    if not tokens or tokens[-1] == 0:
        return left.data.new_zeros((len(ends), left.shape[1], columns), dtype=torch.bfloat16)
    a, b = operands.tokens_last(left, ends), operands.with_lanes(operands.tokens_last(right, ends))
    scales = swizzle.tiled_block_groups(a.scale, blocks), swizzle.tiled_block_groups(b.scale, blocks)
    offsets = torch.tensor(tokens, dtype=torch.int32, device=left.data.device)
    out = _grouped(a.codes, b.codes.t(), *scales, offsets)[:, :, :columns]
    # what a kernel leaves of an empty contraction is not promised
    idle = group_list.diff(prepend=group_list.new_zeros(1)) == 0
    return out.masked_fill(idle.view(-1, 1, 1), 0).contiguous()


def _grouped(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor:
    out: torch.Tensor = F.scaled_grouped_mm(  # type: ignore[attr-defined]
        a.view(torch.float8_e4m3fn),
        b.view(torch.float8_e4m3fn),
        _e8m0(scale_a),
        F.ScalingType.BlockWise1x32,
        _e8m0(scale_b),
        F.ScalingType.BlockWise1x32,
        F.SwizzleType.SWIZZLE_32_4_4,
        F.SwizzleType.SWIZZLE_32_4_4,
        offs=offsets,
        output_dtype=torch.bfloat16,
    )
    return out


def _e8m0(scale: torch.Tensor) -> torch.Tensor:
    return scale.contiguous().view(torch.float8_e8m0fnu)
