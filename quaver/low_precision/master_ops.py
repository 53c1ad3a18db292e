"""What ATen ops mean for a weight at rest, read off tables and schemas: which are refused, which write, which view.

May import: torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten

# Fresh tensors that stay a MasterWeight (without codes): what FSDP2 and nn.Module make of a weight. Views stay
# one as well, so that a write through any of them is counted.
KEEPS_CLASS = {
    aten.clone.default,
    aten.new_zeros.default,
    aten.empty_like.default,
    aten._to_copy.default,
    aten._pin_memory.default,
}
# GEMMs, and the transposes through which F.linear and matmul reach them, would be a silent high-precision path.
REFUSED = {
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten.matmul.default,
    aten.linear.default,
    aten.t.default,
    aten.transpose.int,
    aten.permute.default,
    aten.mv.default,
    aten.dot.default,
    aten.addmv.default,
    aten.addbmm.default,
    aten._grouped_mm.default,
    aten._trilinear.default,
    aten.convolution.default,
    aten._sparse_addmm.default,
}
# A copy in another dtype is how autocast, and code that casts weights to its inputs, would come to a GEMM.
CASTS = {aten._to_copy, aten.to}


def is_view(func: Any) -> bool:
    """True for ops whose result shares storage with an input."""
    return any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)


def is_inplace(func: Any) -> bool:
    """True for ops that return their first argument, written."""
    first = func._schema.arguments[0] if func._schema.arguments else None
    returns = func._schema.returns
    return bool(
        first is not None
        and first.alias_info is not None
        and first.alias_info.is_write
        and len(returns) == 1
        and returns[0].alias_info is not None
        and returns[0].alias_info.is_write
    )


def written(func: Any, args: Any, kwargs: Any) -> Iterator[Any]:
    """Every argument that the op's schema says it writes, lists taken apart."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from tree_leaves(args[index] if index < len(args) else kwargs.get(argument.name))
