"""What ATen ops mean for a weight at rest, read off tags and schemas: which may run, which write, which view.

The list is one of what may run, never of what may not: an op that nobody thought of is refused, so no GEMM, fused
kernel or overload computes with the FP32 master unseen. May run: elementwise ops and reductions (by torch's tags),
views (by schema), the updates of optimisers, copies, initialisers, selections and collectives (by name).
What arithmetic returns is an ordinary tensor, so `x @ (w * mask)` is the caller's own FP32 GEMM. May import: torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten

# Fresh tensors that stay a MasterWeight (without codes): what FSDP2 and nn.Module make of a weight, and copies of
# weights or their rows, which are weights to whoever multiplies by them. Views stay one too: their writes count.
KEEPS_CLASS = {
    aten.clone,
    aten.new_zeros,
    aten.empty_like,
    aten._to_copy,
    aten._pin_memory,
    aten.cat,
    aten.stack,
    aten.index,
    aten.index_select,
}
# A copy in another dtype is how autocast, and code that casts weights to its inputs, would come to a GEMM.
CASTS = {aten._to_copy, aten.to}

# Views, but what F.linear and matmul reach a GEMM by: refused where they start, which names the caller's line.
_TRANSPOSES = frozenset(
    {"t", "transpose", "permute", "adjoint", "mT", "mH", "H", "numpy_T", "matrix_H"}
    | {"swapaxes", "swapdims", "movedim", "moveaxis"}
)
# Ops by name that neither a tag nor a schema tells apart from a GEMM.
_OPTIMISERS = (
    "_fused_adam_ _fused_adamw_ _fused_sgd_ _fused_adagrad_"  # and every _foreach_*: elementwise, norms
)
_COPIES = (
    "copy_ copy _to_copy to _pin_memory is_pinned record_stream detach_ cat stack index index_select gather take "
    "masked_select nonzero flip roll tril triu repeat _unsafe_view _reshape_copy constant_pad_nd "
    "split_copy split_with_sizes_copy unbind_copy slice_copy view_copy _chunk_cat _local_scalar_dense is_same_size"
)
_NEW = (
    "empty_like zeros_like ones_like full_like rand_like randn_like randint_like "
    "new_empty new_empty_strided new_zeros new_ones new_full"
)
_WRITES = (
    "zero_ fill_ fill zero masked_fill_ masked_scatter_ index_copy_ index_put_ _index_put_impl_ index_add_ "
    "index_fill_ index_put index_copy index_add index_fill scatter_ scatter_add_ scatter scatter_add put_ "
    "fill_diagonal_ tril_ triu_ uniform_ normal_ random_ bernoulli_ exponential_ cauchy_ log_normal_ geometric_ "
    "zeros ones full eye rand randn normal"  # these by `out=`, as nn.init.eye_ does
)
_STATISTICS = (
    "sort topk kthvalue median nanmedian mode cumsum cumprod histc bucketize _unique2 mse_loss mse_loss_backward "
    "l1_loss linalg_vector_norm"
)
_NAMED = frozenset(" ".join((_OPTIMISERS, _COPIES, _NEW, _WRITES, _STATISTICS)).split())
_COLLECTIVES = frozenset(
    {"c10d", "_c10d_functional", "fsdp"}
)  # namespaces whose ops only move, sum or compare
_TAGS = frozenset({torch.Tag.pointwise, torch.Tag.reduction})
_FAST_PATHS = frozenset({"_transformer_encoder_layer_fwd", "_native_multi_head_attention"})


@cache
def is_allowed(func: Any) -> bool:
    """True for ops that may run on the FP32 master; False for all others, known or not."""
    if func.namespace in _COLLECTIVES:
        return True
    name = func.overloadpacket.__name__
    if func.namespace != "aten" or name in _TRANSPOSES:
        return False
    if (
        torch.Tag.inplace_view in func.tags
    ):  # set_, t_, resize_, ... would change the master's form, not the weight's
        return name == "detach_"
    return name in _NAMED or name.startswith("_foreach_") or is_view(func) or _is_tagged(name)


def _is_tagged(name: str) -> bool:
    """True if an overload of the op, or of its form that is not in place, is elementwise or a reduction."""
    packets = (getattr(aten, form, None) for form in {name, name.removesuffix("_")})
    return any(
        _TAGS.intersection(getattr(packet, overload).tags)
        for packet in packets
        if packet is not None
        for overload in packet.overloads()
    )


def remedy_for(func: Any) -> str:
    """What a caller whose op was refused does instead."""
    if func.overloadpacket.__name__ in _FAST_PATHS:
        return "torch.backends.mha.set_fastpath_enabled(False): the fused kernel passes the low-precision module by"
    return "call the low-precision module, or take .master where FP32 is really meant"


def moves_nothing(func: Any, kwargs: Any) -> bool:
    """True for a fused optimiser step that a gradient scaler has told to skip; reads its flag off the device."""
    found_inf = kwargs.get("found_inf") if func.overloadpacket.__name__ in _OPTIMISERS.split() else None
    return found_inf is not None and bool(found_inf)


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
