"""The four GEMM calls of the NPU: dense and grouped, MXFP8 and HiF8, each for fprop, dgrad and wgrad.

x1's scale is `pertoken_scale` and x2's the positional `scale`; matrix and scale share their transpose state as
non-contiguous views. MXFP8 codes go in as float8_e4m3fn, E8M0 scales as uint8 beside their tag, HiF8 codes as uint8
beside theirs. May import: torch, contract, layouts, tags.
"""

from __future__ import annotations

import torch

from quaver.backends.contract import Layout, QuantizedOperand
from quaver.backends.npu.layouts import left_operand, pack_groups, right_operand
from quaver.backends.npu.tags import (
    BLOCK,
    CUMULATIVE,
    FLOAT8_E8M0FNU,
    HIFLOAT8,
    ONE_OUTPUT,
    OUTPUT_DTYPE,
    SPLIT_K,
    SPLIT_M,
)


def _matrices(
    left: QuantizedOperand, right: QuantizedOperand, layout: Layout
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both matrices as the product reads them, transposed as views."""
    x1 = left.data.transpose(-1, -2) if layout[0] == "T" else left.data
    x2 = right.data.transpose(-1, -2) if layout[1] == "T" else right.data
    return x1, x2


def mx_matmul(
    left: QuantizedOperand, right: QuantizedOperand, layout: Layout, output_dtype: torch.dtype
) -> torch.Tensor:
    """[M, K] x [K, N] of MXFP8 operands."""
    x1, x2 = _matrices(left, right, layout)
    x1, x1_scale = left_operand(x1, left.scale.t() if layout[0] == "T" else left.scale)
    x2, x2_scale = right_operand(x2, right.scale.t() if layout[1] == "T" else right.scale)
    out: torch.Tensor = torch.ops.npu.npu_quant_matmul(
        x1.view(torch.float8_e4m3fn),
        x2.view(torch.float8_e4m3fn),
        x2_scale,
        pertoken_scale=x1_scale,
        output_dtype=OUTPUT_DTYPE[output_dtype],
        scale_dtype=FLOAT8_E8M0FNU,
        pertoken_scale_dtype=FLOAT8_E8M0FNU,
        group_sizes=[1, 1, BLOCK],
    )
    return out


def hif8_matmul(
    left: QuantizedOperand, right: QuantizedOperand, layout: Layout, output_dtype: torch.dtype
) -> torch.Tensor:
    """[M, K] x [K, N] of HiF8 operands; without x1_dtype and x2_dtype the codes would be plain integers."""
    x1, x2 = _matrices(left, right, layout)
    out: torch.Tensor = torch.ops.npu.npu_quant_matmul(
        x1,
        x2,
        right.scale.reshape(1),
        pertoken_scale=left.scale.reshape(1),
        output_dtype=OUTPUT_DTYPE[output_dtype],
        x1_dtype=HIFLOAT8,
        x2_dtype=HIFLOAT8,
    )
    return out


def mx_grouped_matmul(
    left: QuantizedOperand,
    right: QuantizedOperand,
    group_list: torch.Tensor,
    ends: list[int],
    layout: Layout,
    output_dtype: torch.dtype,
) -> torch.Tensor:
    """NN, NT: [S, K] x [E, K, N] by rows; TN: [N, S] x [S, K] -> [E, N, K], the tokens contracted per group."""
    x, weight = _matrices(left, right, layout)
    if layout == "TN":
        x_scale = pack_groups(left.scale, ends).transpose(0, 1)
        weight_scale = pack_groups(right.scale, ends)
    else:
        x, x_scale = left_operand(x, left.scale)
        scale = right.scale.transpose(-1, -2) if layout == "NT" else right.scale
        weight, weight_scale = right_operand(weight, scale)
    (out,) = torch.ops.npu.npu_grouped_matmul(
        [x.view(torch.float8_e4m3fn)],
        [weight.view(torch.float8_e4m3fn)],
        scale=[weight_scale],
        per_token_scale=[x_scale],
        group_list=group_list,
        split_item=ONE_OUTPUT,
        group_type=SPLIT_K if layout == "TN" else SPLIT_M,
        group_list_type=CUMULATIVE,
        output_dtype=OUTPUT_DTYPE[output_dtype],
        scale_dtype=FLOAT8_E8M0FNU,
        per_token_scale_dtype=FLOAT8_E8M0FNU,
    )
    return out


def hif8_grouped_matmul(
    left: QuantizedOperand,
    right: QuantizedOperand,
    group_list: torch.Tensor,
    layout: Layout,
    output_dtype: torch.dtype,
) -> torch.Tensor:
    """As `mx_grouped_matmul`; scales are FP32, one a group: a tensor's own one is repeated."""
    x, weight = _matrices(left, right, layout)
    groups = group_list.numel()
    (out,) = torch.ops.npu.npu_grouped_matmul(
        [x],
        [weight],
        scale=[right.scale.expand(groups).contiguous()],
        per_token_scale=[left.scale.expand(groups).contiguous()],
        group_list=group_list,
        split_item=ONE_OUTPUT,
        group_type=SPLIT_K if layout == "TN" else SPLIT_M,
        group_list_type=CUMULATIVE,
        output_dtype=OUTPUT_DTYPE[output_dtype],
        x_dtype=HIFLOAT8,
        weight_dtype=HIFLOAT8,
    )
    return out
