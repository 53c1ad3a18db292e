"""Quantising on the NPU: which operator takes a tensor, and what comes back in the contract's terms.

Dual-axis, grouped and dynamic per-tensor operators take BF16; FP32 masters go through `npu_dynamic_mx_quant` once an
axis (MXFP8) or through `npu_quantize` under a scale computed here (HiF8), so codes never come from a BF16 copy. Every
call names its dtype tag and rule: the operators' own defaults are FP4, E5M2 and another maximum.
May import: torch, contract, errors, formats, layouts, tags.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from quaver.backends.contract import OperandError, Orientation, ScalingSpec
from quaver.backends.npu.layouts import unpack_before, unpack_groups, unpack_last
from quaver.backends.npu.tags import BLOCK, FLOAT8_E4M3FN, HIFLOAT8, MAX_GROUPS, SCALE_ALG
from quaver.errors import CapabilityError
from quaver.formats import hif8

Coded = tuple[torch.Tensor, torch.Tensor]  # uint8 codes, scale in the contract's layout


def scale_alg(spec: ScalingSpec) -> int:
    """The operators' number of a scale rule; CapabilityError for a rule that they do not have."""
    rule = spec.scale_rule or "floor"
    if rule not in SCALE_ALG:
        raise CapabilityError(
            f"backend npu has no scale rule {rule!r}",
            where="low_precision.scale_rule",
            remedy=f"use one of {sorted(SCALE_ALG)}",
        )
    return SCALE_ALG[rule]


def mx_one_axis(tensor: torch.Tensor, spec: ScalingSpec, orientation: Orientation) -> Coded:
    """Blocks along the last axis (row) or the one before (col) of a BF16 or FP32 tensor, 2-D or 3-D."""
    axis = -1 if orientation == "row" else -2
    length = tensor.shape[axis]
    if tensor.dtype is torch.float32 and length < BLOCK:
        # the operator takes an FP32 axis of 32 elements or more; zeros move no maximum
        missing = BLOCK - length
        tensor = F.pad(tensor, (0, missing) if axis == -1 else (0, 0, 0, missing))
    codes, packed = torch.ops.npu.npu_dynamic_mx_quant(
        tensor, axis=axis, dst_type=FLOAT8_E4M3FN, block_size=BLOCK, scale_alg=scale_alg(spec)
    )
    codes = codes.view(torch.uint8).narrow(axis, 0, length).contiguous()
    return codes, (unpack_last if axis == -1 else unpack_before)(packed, length)


def mx_both_axes(tensor: torch.Tensor, spec: ScalingSpec) -> tuple[Coded, Coded]:
    """(row, col): one read of a BF16 tensor; an FP32 one is read once an axis."""
    if tensor.dtype is torch.float32:
        return mx_one_axis(tensor, spec, "row"), mx_one_axis(tensor, spec, "col")
    row, row_scale, col, col_scale = torch.ops.npu.npu_dynamic_mx_quant_with_dual_axis(
        tensor, dst_type=FLOAT8_E4M3FN, scale_alg=scale_alg(spec)
    )
    return (
        (row.view(torch.uint8), unpack_last(row_scale, tensor.shape[-1])),
        (col.view(torch.uint8), unpack_before(col_scale, tensor.shape[-2])),
    )


def mx_grouped_tokens(tensor: torch.Tensor, spec: ScalingSpec, group_list: torch.Tensor) -> Coded:
    """Blocks along the tokens [S, K] that restart at each group; `group_list`: [E] int64 cumulative ends."""
    ends = check_groups(group_list, tensor.shape[0])
    if tensor.dtype is not torch.bfloat16:
        raise OperandError(
            f"npu_grouped_dynamic_mx_quant takes BF16 tokens, these are {tensor.dtype}",
            where=f"tokens {tuple(tensor.shape)}",
            remedy="run the experts in BF16: build the model in BF16 activations, or use autocast",
        )
    codes, packed = torch.ops.npu.npu_grouped_dynamic_mx_quant(
        tensor,
        group_list.to(torch.int32),
        dst_type=FLOAT8_E4M3FN,
        blocksize=BLOCK,
        scale_alg=scale_alg(spec),
    )
    return codes.view(torch.uint8), unpack_groups(packed, ends)


def check_groups(group_list: torch.Tensor, rows: int) -> list[int]:
    """The ends on the host; OperandError unless int64 [E], at most 1024 groups, and ending at `rows`."""
    if group_list.dtype is not torch.int64 or group_list.ndim != 1:
        raise OperandError(f"group_list is {group_list.dtype} {tuple(group_list.shape)}, wanted int64 [E]")
    if group_list.numel() > MAX_GROUPS:
        raise OperandError(f"{group_list.numel()} groups; the NPU's grouped operators take at most {MAX_GROUPS}")
    ends: list[int] = group_list.tolist()
    if ends != sorted(ends) or (ends[-1] if ends else 0) != rows or (ends and ends[0] < 0):
        raise OperandError(f"group_list {ends} does not ascend to the {rows} rows")
    return ends


def hif8_current(tensor: torch.Tensor, spec: ScalingSpec) -> Coded:
    """One scale from the tensor's own amax; a BF16 matrix takes the fused operator.

    The operator divides by the scale it found: where that is 0 or not finite its codes are NaN or lost, so the guard
    takes the codes under scale 1 there, as the recipe says. Decided on the device, without a copy to the host.
    """
    if tensor.dtype is not torch.bfloat16 or tensor.ndim != 2 or not tensor.numel():
        return hif8_given(tensor, spec, _amax(tensor))
    codes, scale = torch.ops.npu.npu_dynamic_quant(
        tensor, dst_type=HIFLOAT8, quant_mode="pertensor", dst_type_max=format_max(spec)
    )
    good = torch.isfinite(scale) & (scale > 0)
    one = torch.ones_like(scale)
    # beside a BF16 input the operator wants a BF16 scale; 1 is 1 in either
    plain = torch.ops.npu.npu_quantize(tensor, one.bfloat16(), None, HIFLOAT8, axis=0, div_mode=True)
    guarded = torch.where(good, codes.view(torch.uint8), plain.view(torch.uint8))
    return guarded, torch.where(good, scale, one).reshape(())


def hif8_given(tensor: torch.Tensor, spec: ScalingSpec, amax: torch.Tensor) -> Coded:
    """One scale from a given amax (0-d), or one per leading index of a 3-D tensor ([E])."""
    scale = hif8.scale_from_amax(amax, format_max(spec))
    codes = torch.ops.npu.npu_quantize(
        tensor.float(), scale.reshape(-1), None, HIFLOAT8, axis=0, div_mode=True
    )
    return codes.view(torch.uint8), scale


def format_max(spec: ScalingSpec) -> float:
    """15 or 224; ValueError where the recipe leaves it out, since the operator's own is neither."""
    if spec.format_max is None:
        raise ValueError("HiF8 needs a format_max in its ScalingSpec")
    return spec.format_max


def _amax(tensor: torch.Tensor) -> torch.Tensor:
    """FP32 amax: 0-d of a matrix, [E] of a stack; 0 of nothing, NaN if there is one."""
    if tensor.numel() == 0:
        return torch.zeros(tensor.shape[:1] if tensor.ndim == 3 else (), device=tensor.device)
    return tensor.abs().amax(dim=(1, 2) if tensor.ndim == 3 else (0, 1)).float()
