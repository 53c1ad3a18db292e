"""The integers that torch_npu's operators take for dtypes and rules, and what each format needs of an NPU.

A torch.dtype passed to an `int` argument arrives as ATen's ScalarType number, so nothing here is a torch.dtype:
tags are the ACL data type + 256, as torch_npu offers them. HiF8 and E8M0 tensors are uint8 beside such a tag.
May import: torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

HIFLOAT8 = 290
FLOAT8_E4M3FN = 292
FLOAT8_E8M0FNU = 293

BLOCK = 32  # elements a scale
PAIR = 2 * BLOCK  # elements that two neighbouring scales cover: the unit of scale storage
MAX_GROUPS = 1024  # of one grouped GEMM
CUMULATIVE = 0  # group_list_type: cumulative ends
ONE_OUTPUT = 3  # split_item: one tensor in, one tensor out
SPLIT_M, SPLIT_K = 0, 2  # group_type: groups divide the rows of the output, or the contracted axis

SCALE_ALG: Mapping[str, int] = {"floor": 0, "rceil": 1}
# ATen's numbers: the shape functions of torch_npu know outputs by these alone
OUTPUT_DTYPE: Mapping[torch.dtype, int] = {torch.bfloat16: 15, torch.float32: 6}

DENSE_KERNEL = "npu_quant_matmul"
GROUPED_KERNEL = "npu_grouped_matmul"


@dataclass(frozen=True)
class Needs:
    """What one format needs of torch_npu.

    Args:
        ops: operators of torch.ops.npu -> the arguments that are passed to each by name.
        tags: dtype constants of the torch_npu module -> their values.
    """

    ops: Mapping[str, tuple[str, ...]]
    tags: Mapping[str, int]


_GROUPED = ("scale", "per_token_scale", "group_list", "split_item", "group_type", "group_list_type", "output_dtype")

NEEDS: Mapping[str, Needs] = {
    "mxfp8_e4m3": Needs(
        ops={
            "npu_dynamic_mx_quant": ("axis", "dst_type", "block_size", "scale_alg"),
            "npu_dynamic_mx_quant_with_dual_axis": ("dst_type", "scale_alg"),
            "npu_grouped_dynamic_mx_quant": ("dst_type", "blocksize", "scale_alg"),
            DENSE_KERNEL: ("pertoken_scale", "output_dtype", "scale_dtype", "pertoken_scale_dtype", "group_sizes"),
            GROUPED_KERNEL: (*_GROUPED, "scale_dtype", "per_token_scale_dtype"),
        },
        tags={"float8_e4m3fn": FLOAT8_E4M3FN, "float8_e8m0fnu": FLOAT8_E8M0FNU},
    ),
    "hif8": Needs(
        ops={
            "npu_dynamic_quant": ("dst_type", "quant_mode", "dst_type_max"),
            "npu_quantize": ("axis", "div_mode"),
            DENSE_KERNEL: ("pertoken_scale", "output_dtype", "x1_dtype", "x2_dtype"),
            GROUPED_KERNEL: (*_GROUPED, "x_dtype", "weight_dtype"),
        },
        tags={"hifloat8": HIFLOAT8},
    ),
}
