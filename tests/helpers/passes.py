"""Operands of the three dense GEMMs, and one pass through a dense layer and experts, for tests of any backend."""

from __future__ import annotations

import torch

from helpers.experts import grouped_weight, routing_of
from helpers.policies import linear
from quaver.backends import QuantizationRole, QuantizedOperand, ReferenceBackend
from quaver.low_precision import LowPrecisionPolicy, low_precision_grouped_swiglu
from quaver.low_precision.recipe import RECIPES

Role = QuantizationRole


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    """Random values whose columns differ in size by up to 2^10."""
    torch.manual_seed(seed)
    values = torch.randn(*shape) * torch.logspace(-5, 5, shape[-1], base=2.0)
    return values.to(dtype)


def dense_operands(
    layout: str, recipe: str, dtype: torch.dtype, t: int = 70, n: int = 40, k: int = 96
) -> list[QuantizedOperand]:
    """Left and right of a layout, as the reference quantises them."""
    sizes = {"NT": ((t, k), (n, k)), "NN": ((t, n), (n, k)), "TN": ((t, n), (t, k))}[layout]
    turns = {"NT": ("row", "row"), "NN": ("row", "col"), "TN": ("col", "col")}[layout]
    roles = RECIPES[recipe].roles
    role = (Role.INPUT_FWD if layout == "NT" else Role.GRAD_OUTPUT, Role.WEIGHT_FWD)
    return [
        ReferenceBackend().quantize(
            tensor(*size, dtype=dtype, seed=i), spec=roles[role[i]], role=role[i], orientation=turns[i]
        )
        for i, size in enumerate(sizes)
    ]


def one_pass(bound: LowPrecisionPolicy) -> None:
    """A dense layer and two expert weights, forward and backward, with an expert that has no token.

    Contracted axes are longer than 64, so that every scale has two pairs and a state of its own.
    """
    torch.manual_seed(0)
    x = torch.randn(70, 96).bfloat16().requires_grad_()
    linear(bound, torch.randn(80, 96))(x).float().pow(2).sum().backward()
    gate_up = grouped_weight(torch.randn(3, 144, 96), bound, "gate_up")
    down = grouped_weight(torch.randn(3, 96, 72), bound, "down")
    index = routing_of([40, 0, 33])
    x = torch.randn(index.shape[0], 96).bfloat16().requires_grad_()
    weights = torch.rand(index.shape, requires_grad=True)
    out = low_precision_grouped_swiglu(
        x, index, weights, gate_up, down, sites=("gate_up", "down"), recipe=bound.recipe
    )
    out.float().pow(2).sum().backward()


