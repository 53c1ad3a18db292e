"""The two GEMMs as functions on operands, for callers that hold operands and no backend.

May import: backends.
"""

from __future__ import annotations

import torch

from quaver.backends import Backend, GemmSite, Layout, QuantizedOperand, ReferenceBackend


def low_precision_matmul(
    left: QuantizedOperand,
    right: QuantizedOperand,
    *,
    layout: Layout,
    output_dtype: torch.dtype,
    site: GemmSite,
    backend: Backend | None = None,
) -> torch.Tensor:
    """NN: [T,N]x[N,K]; NT: [T,K]x[N,K]^T; TN: [T,N]^Tx[T,K]; FP32 accumulation, one rounding to `output_dtype`.

    `backend` None computes on the reference backend. Raises OperandError if the scale blocks of an operand do
    not run along the contracted axis, or shapes or formats do not fit.
    """
    backend = backend if backend is not None else ReferenceBackend()
    return backend.low_precision_matmul(left, right, layout=layout, output_dtype=output_dtype, site=site)


def low_precision_grouped_matmul(
    left: QuantizedOperand,
    right: QuantizedOperand,
    group_list: torch.Tensor,
    *,
    layout: Layout,
    output_dtype: torch.dtype,
    site: GemmSite,
    backend: Backend | None = None,
) -> torch.Tensor:
    """Tokens sorted by group. NN: [S,K]x[E,K,N]; NT: [S,N]x[E,K,N]^T; TN: [S,N]^Tx[S,K] -> [E,N,K].

    `group_list`: [E] int64 cumulative ends. `backend` None computes on the reference backend.
    """
    backend = backend if backend is not None else ReferenceBackend()
    return backend.low_precision_grouped_matmul(
        left, right, group_list, layout=layout, output_dtype=output_dtype, site=site
    )
