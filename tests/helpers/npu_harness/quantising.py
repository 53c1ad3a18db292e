"""The five quantising operators, on the exact codecs. They have the schemas' own defaults: FP4, E5M2, another rule."""

from __future__ import annotations

import torch

from helpers.npu_harness.refusal import absent, typed, want
from helpers.npu_harness.storage import BLOCK, group_pairs, pairs
from quaver.formats import hif8, mxfp8

E4M3FN, HIFLOAT8 = 292, 290
HIF8_OWN_MAX = 32768.0
RULES = {0: "floor", 1: "rceil"}
Pair = tuple[torch.Tensor, torch.Tensor]


def _check_mx(dst_type, scale_alg, round_mode, dst_type_max):
    want(dst_type == E4M3FN, f"dst_type {dst_type}: only E4M3 (292) is computed here")
    want(scale_alg in RULES, f"scale_alg {scale_alg} is no rule of E4M3")
    want(round_mode == "rint", f"round_mode {round_mode!r} is none of E4M3")
    want(not dst_type_max, "dst_type_max belongs to FP4")


def _mx(x: torch.Tensor, axis: int, scale_alg: int) -> Pair:
    codes, scale = mxfp8.quantize(x, axis=axis, scale_rule=RULES[scale_alg])
    return codes.view(torch.float8_e4m3fn), pairs(scale, axis)


def npu_dynamic_mx_quant(
    input, *, axis=-1, round_mode="rint", dst_type=296, block_size=32, scale_alg=0, dst_type_max=0.0, max_low_bound=0.0
):
    """One axis; BF16, or FP32 where the axis has 32 elements or more."""
    _check_mx(dst_type, scale_alg, round_mode, dst_type_max)
    typed("input", input, torch.bfloat16, torch.float32)
    want(block_size == BLOCK, f"block_size {block_size} is not 32")
    want(max_low_bound == 0, "max_low_bound moves scales")
    axis = axis - input.ndim if axis >= 0 else axis
    want(axis in (-1, -2) and input.ndim >= 2, f"axis {axis} of {input.ndim} dimensions")
    want(input.dtype is torch.bfloat16 or input.shape[axis] >= BLOCK, "an FP32 axis has 32 elements or more")
    return _mx(input, axis, scale_alg)


def npu_dynamic_mx_quant_with_dual_axis(input, *, round_mode="rint", dst_type=296, scale_alg=0, dst_type_max=0.0):
    """Both axes of BF16: the last one first."""
    _check_mx(dst_type, scale_alg, round_mode, dst_type_max)
    typed("input", input, torch.bfloat16)
    return *_mx(input, -1, scale_alg), *_mx(input, -2, scale_alg)


def npu_grouped_dynamic_mx_quant(
    x, group_index, *, round_mode="rint", dst_type=23, blocksize=32, scale_alg=0, dst_type_max=0.0
):
    """Tokens of BF16, blocks restarting at each group of an int32 list of cumulative ends."""
    _check_mx(dst_type, scale_alg, round_mode, dst_type_max)
    typed("x", x, torch.bfloat16)
    typed("group_index", group_index, torch.int32)
    want(x.ndim == 2 and group_index.ndim == 1, "x is 2-D, group_index 1-D")
    want(blocksize == BLOCK, f"blocksize {blocksize} is not 32")
    ends = group_index.tolist()
    want(ends == sorted(ends) and ends[-1] == x.shape[0], f"group_index {ends} does not ascend to {x.shape[0]} rows")
    codes, scale = mxfp8.quantize_groups(x, group_index.long(), scale_rule=RULES[scale_alg])
    return codes.view(torch.float8_e4m3fn), group_pairs(scale, ends)


def npu_dynamic_quant(
    input, *, smooth_scales=None, group_index=None, dst_type=None, quant_mode="pertoken", dst_type_max=0.0
):
    """One HiF8 scale of a BF16 tensor, amax / dst_type_max, without any guard: amax 0 divides 0 by 0."""
    absent(smooth_scales=smooth_scales, group_index=group_index)
    want(dst_type == HIFLOAT8, f"dst_type {dst_type}: only HiF8 (290) is computed here")
    want(quant_mode == "pertensor", f"quant_mode {quant_mode!r}: only one scale a tensor is computed here")
    typed("input", input, torch.bfloat16)
    scale = input.abs().amax().float().reshape(1) / (dst_type_max or HIF8_OWN_MAX)
    return hif8.encode(input.float() / scale), scale


def npu_quantize(input, scales, zero_points, dtype, axis=1, div_mode=True):
    """HiF8 codes of input / scales: one scale, or one for each index of an axis; FP32 both, or BF16 both."""
    absent(zero_points=zero_points)
    want(dtype == HIFLOAT8, f"dtype {dtype}: only HiF8 (290) is computed here")
    typed("input", input, torch.float32, torch.bfloat16)
    typed("scales", scales, input.dtype)
    want(scales.ndim == 1, f"scales are {tuple(scales.shape)}, wanted one dimension")
    want(-input.ndim <= axis < input.ndim, f"axis {axis} of {input.ndim} dimensions")
    if scales.numel() != 1:
        want(scales.numel() == input.shape[axis], f"{scales.numel()} scales for {input.shape[axis]} indices")
    shape = [1] * input.ndim
    shape[axis] = scales.numel()
    spread = scales.float().view(shape)
    values = input.float() / spread if div_mode else input.float() * spread
    return hif8.encode(values)
