"""The two products, on the reference backend. What contracts what, and how, comes from strides, shapes and tags."""

from __future__ import annotations

import torch

from helpers.npu_harness.refusal import HarnessError, absent, shaped, typed, want
from helpers.npu_harness.storage import BLOCK, PAIR, ceil, group_singles, singles, transposed
from quaver.backends import GemmSite, QuantizedOperand, ReferenceBackend

HIFLOAT8, E8M0FNU = 290, 293
OUTPUT = {15: torch.bfloat16, 6: torch.float32}
SITE = GemmSite("npu_harness", "fprop")
MXFP8, HIF8 = "mxfp8_e4m3", "hif8"


def _output(output_dtype):
    want(output_dtype in OUTPUT, f"output_dtype {output_dtype} is neither 15 (BF16) nor 6 (FP32)")
    return OUTPUT[output_dtype]


def _operand(data, scale, format, orientation):
    return QuantizedOperand(data.view(torch.uint8), scale, torch.bfloat16, format, orientation)


def _format(codes, scales, names, x1_dtype, x2_dtype, scale_dtype, other_scale_dtype) -> str:
    """Which format the tags and dtypes say; HarnessError unless all say one."""
    x1, x2 = codes
    if x1_dtype is None and x2_dtype is None:
        typed(names[0], x1, torch.float8_e4m3fn)
        typed(names[1], x2, torch.float8_e4m3fn)
        want(scale_dtype == E8M0FNU and other_scale_dtype == E8M0FNU, "E8M0 scales need their tag (293), both of them")
        for scale in scales:
            typed("an E8M0 scale", scale, torch.uint8)
        return MXFP8
    want(x1_dtype == HIFLOAT8 and x2_dtype == HIFLOAT8, f"tags {x1_dtype} and {x2_dtype} are not HiF8 (290) both")
    absent(scale_dtype=scale_dtype, pertoken_scale_dtype=other_scale_dtype)
    typed(names[0], x1, torch.uint8)
    typed(names[1], x2, torch.uint8)
    for scale in scales:
        typed("a HiF8 scale", scale, torch.float32)
    return HIF8


def npu_quant_matmul(
    x1, x2, scale, *, offset=None, pertoken_scale=None, bias=None, output_dtype=None, x1_dtype=None, x2_dtype=None,
    pertoken_scale_dtype=None, scale_dtype=None, group_sizes=None, y_scale=None,
):  # fmt: skip
    """[M, K] x [K, N]; x1 has pertoken_scale, x2 the positional one."""
    absent(offset=offset, bias=bias, y_scale=y_scale)
    want(pertoken_scale is not None, "x1 has no scale")
    want(x1.ndim == 2 and x2.ndim == 2, "two matrices")
    (m, k), n = x1.shape, x2.shape[1]
    want(x2.shape[0] == k, f"contracted lengths {k} and {x2.shape[0]}")
    tags = (x1_dtype, x2_dtype, scale_dtype, pertoken_scale_dtype)
    format = _format((x1, x2), (scale, pertoken_scale), ("x1", "x2"), *tags)
    if format == MXFP8:
        want(list(group_sizes or ()) == [1, 1, BLOCK], f"group_sizes {group_sizes}, wanted [1, 1, 32]")
        shaped("pertoken_scale", pertoken_scale, m, ceil(k, PAIR), 2)
        shaped("scale", scale, ceil(k, PAIR), n, 2)
        left_t, right_t = transposed(x1, pertoken_scale), transposed(x2, scale)
        left_scale = singles(pertoken_scale, -1, ceil(k, BLOCK))
        right_scale = singles(scale, -2, ceil(k, BLOCK))
        left_scale = left_scale.t().contiguous() if left_t else left_scale
        right_scale = right_scale.t().contiguous() if right_t else right_scale
    else:
        want(group_sizes is None, "HiF8 has no groups along the contraction")
        shaped("pertoken_scale", pertoken_scale, 1)
        shaped("scale", scale, 1)
        left_t, right_t = transposed(x1), transposed(x2)
        left_scale, right_scale = pertoken_scale[0], scale[0]
    layout = ("T" if left_t else "N") + ("T" if right_t else "N")
    want(layout != "TT", "no GEMM of training transposes both")
    left = _operand(x1.t() if left_t else x1, left_scale, format, "col" if left_t else "row")
    right = _operand(x2.t() if right_t else x2, right_scale, format, "row" if right_t else "col")
    return ReferenceBackend().low_precision_matmul(
        left, right, layout=layout, output_dtype=_output(output_dtype), site=SITE
    )


def npu_grouped_matmul(
    x, weight, *, bias=None, scale=None, offset=None, antiquant_scale=None, antiquant_offset=None,
    per_token_scale=None, group_list=None, activation_input=None, activation_quant_scale=None,
    activation_quant_offset=None, split_item=0, group_type=None, group_list_type=0, act_type=0, tuning_config=None,
    output_dtype=None, x_dtype=None, weight_dtype=None, scale_dtype=None, per_token_scale_dtype=None,
):  # fmt: skip
    """group_type 0: rows of x [S, K] by group x weight [G, K, N]; 2: x [N, S] x weight [S, K], S contracted."""
    absent(
        bias=bias, offset=offset, antiquant_scale=antiquant_scale, antiquant_offset=antiquant_offset,
        activation_input=activation_input, activation_quant_scale=activation_quant_scale,
        activation_quant_offset=activation_quant_offset, tuning_config=tuning_config,
    )  # fmt: skip
    want(act_type == 0 and split_item == 3, f"act_type {act_type}, split_item {split_item}: wanted 0 and 3")
    want(group_list_type == 0, f"group_list_type {group_list_type}: only cumulative ends (0) are computed here")
    want(scale is not None and per_token_scale is not None, "a scale is missing")
    lists = (x, weight, scale, per_token_scale)
    want(all(len(one) == 1 for one in lists), "one tensor each")
    (x,), (weight,), (scale,), (per_token_scale,) = lists
    want(group_list is not None, "group_list is missing")
    typed("group_list", group_list, torch.int64)
    want(group_list.ndim == 1 and 0 < group_list.numel() <= 1024, "group_list has 1 to 1024 ends")
    tags = (x_dtype, weight_dtype, scale_dtype, per_token_scale_dtype)
    format = _format((x, weight), (scale, per_token_scale), ("x", "weight"), *tags)
    if group_type not in (0, 2):
        raise HarnessError(f"group_type {group_type}: rows are split (0) or the contraction is (2)")
    operands = (_by_rows if group_type == 0 else _by_contraction)(x, weight, scale, per_token_scale, group_list, format)
    out = ReferenceBackend().low_precision_grouped_matmul(
        *operands,
        group_list,
        layout="NN" if group_type == 0 else "TN",
        output_dtype=_output(output_dtype),
        site=SITE,
    )
    return [out]


def _by_rows(x, weight, scale, per_token_scale, group_list, format):
    want(x.ndim == 2 and weight.ndim == 3, "x is 2-D, weight 3-D")
    (s, k), groups, n = x.shape, group_list.numel(), weight.shape[2]
    want(tuple(weight.shape[:2]) == (groups, k), f"weight {tuple(weight.shape)}, wanted ({groups}, {k}, N)")
    if format == HIF8:
        want(not transposed(x), "rows cannot be split of a transposed x")
        left_scale, right_scale = _one_scale(per_token_scale, groups), scale
        shaped("scale", scale, groups)
        transposed(weight)
    else:
        shaped("per_token_scale", per_token_scale, s, ceil(k, PAIR), 2)
        shaped("scale", scale, groups, ceil(k, PAIR), n, 2)
        want(not transposed(x, per_token_scale), "rows cannot be split of a transposed x")
        left_scale = singles(per_token_scale, -1, ceil(k, BLOCK))
        right_scale = singles(scale, -2, ceil(k, BLOCK))
        if transposed(weight, scale):  # as the codes lie, so that both are read the same way
            right_scale = right_scale.transpose(1, 2).contiguous().transpose(1, 2)
    return _operand(x, left_scale, format, "row"), _operand(weight, right_scale, format, "col")


def _by_contraction(x, weight, scale, per_token_scale, group_list, format):
    want(x.ndim == 2 and weight.ndim == 2, "x and weight are 2-D")
    (n, s), k, ends = x.shape, weight.shape[1], group_list.tolist()
    want(weight.shape[0] == s, f"contracted lengths {s} and {weight.shape[0]}")
    if format == HIF8:
        want(transposed(x) and not transposed(weight), "x is the transposed view of tokens, weight is not")
        left_scale, right_scale = _one_scale(per_token_scale, len(ends)), _one_scale(scale, len(ends))
    else:
        rows = s // PAIR + len(ends)
        shaped("per_token_scale", per_token_scale, n, rows, 2)
        shaped("scale", scale, rows, k, 2)
        want(transposed(x, per_token_scale), "x is the transposed view of tokens")
        want(not transposed(weight, scale), "weight holds tokens as they are")
        want(ends == sorted(ends) and ends[-1] == s, f"ends {ends} do not ascend to {s}")
        left_scale = group_singles(per_token_scale.transpose(0, 1), ends)
        right_scale = group_singles(scale, ends)
    return _operand(x.t(), left_scale, format, "col"), _operand(weight, right_scale, format, "col")


def _one_scale(scales, groups):
    """A tensor's own scale, repeated for each group."""
    shaped("a scale of a whole tensor", scales, groups)
    want(bool((scales == scales[0]).all()), "tokens of one tensor have one scale")
    return scales[0]
