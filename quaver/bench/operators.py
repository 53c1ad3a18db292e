"""Quantising over a copy, and a dense layer's forward and backward over BF16's and torchao's.

Quantising is timed as codes, by row, by column and both ways, which is what weights and what is kept for later are;
and as training does it with what it multiplies at once: both ways of a gradient as BF16 values, and of an input BF16
values by row (the product that comes next) and codes by column (which the backward pass reads).

A low-precision layer is timed as a training step uses it: its weight is quantised from its FP32 master once,
then comes one forward and one backward of all tokens of the step. May import: policies, low_precision, backends.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import cycle

import torch
from torch import nn

from quaver.backends import Orientation, QuantizationRole
from quaver.bench import torchao_peer
from quaver.bench.comparison import Comparison, Group, turns
from quaver.bench.policies import LABELS, low_precision_linear, policy
from quaver.bench.sizes import Sizes
from quaver.bench.timing import Contestant
from quaver.low_precision import Quantizer, refresh

OUT_OF_CACHES = 128 << 20
"""Bytes of several tensors that no last-level cache of ours holds."""

AS_TRAINED = {"gradient": QuantizationRole.GRAD_OUTPUT, "input": QuantizationRole.INPUT_FWD}


def drawn(*shape: int, scale: float = 1.0, seed: int = 0) -> torch.Tensor:
    """Normal numbers in FP32, the same in every process."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


@contextmanager
def quantise_contestants(sizes: Sizes, needed: frozenset[str]) -> Iterator[Mapping[str, Contestant]]:
    """BF16 [tokens, N] to codes and scales, or to the values that training multiplies; a copy. All make new tensors.

    Each run reads the next of several tensors: one alone would lie in the last-level cache, or not, as the machine's
    other users leave it room, and a copy out of it takes half the time.
    """
    first = drawn(sizes.tokens, sizes.linear[1]).bfloat16()
    tensors = cycle([first, *(first.roll(n, 0) for n in range(1, -(-OUT_OF_CACHES // first.nbytes)))])

    def one_axis(quantizer: Quantizer, orientation: Orientation) -> None:
        quantizer.quantize(next(tensors), orientation=orientation)

    def both_axes(quantizer: Quantizer) -> None:
        quantizer.quantize_dual(next(tensors))

    def copy() -> None:
        next(tensors).clone()

    contestants: dict[str, Contestant] = {"copy": copy}
    for fmt in ("mxfp8", "hif8"):
        quantizer = policy(fmt).recipe.quantizer(QuantizationRole.INPUT_BWD)  # a role that writes codes both ways
        contestants[f"{fmt} row"] = partial(one_axis, quantizer, "row")
        contestants[f"{fmt} col"] = partial(one_axis, quantizer, "col")
        contestants[f"{fmt} both"] = partial(both_axes, quantizer)
    for name, role in AS_TRAINED.items():
        contestants[f"mxfp8 {name}"] = partial(both_axes, policy("mxfp8").recipe.quantizer(role))
    yield contestants


@contextmanager
def linear_contestants(sizes: Sizes, needed: frozenset[str]) -> Iterator[Mapping[str, Contestant]]:
    """Forward, dgrad and wgrad of one layer; low-precision ones with the refresh of their weight."""
    inputs, outputs = sizes.linear
    x = drawn(sizes.tokens, inputs).bfloat16().requires_grad_()
    toward = drawn(sizes.tokens, outputs, scale=1e-3, seed=1).bfloat16()
    weight = drawn(outputs, inputs, scale=0.02, seed=2).bfloat16().float()

    def step(layer: nn.Module) -> None:
        torch.autograd.grad(layer(x), (x, layer.get_parameter("weight")), toward)

    def refreshed_step(layer: nn.Module) -> None:
        refresh(layer)
        step(layer)

    contestants: dict[str, Contestant] = {}
    if "bf16" in needed:
        plain = nn.Linear(inputs, outputs, bias=False, dtype=torch.bfloat16)
        plain.load_state_dict({"weight": weight})
        contestants["bf16"] = partial(step, plain)
    for fmt in ("mxfp8", "hif8"):  # in this order, whatever the hashes of strings are in this process
        if fmt in needed:
            layer = low_precision_linear(fmt, weight)
            contestants[fmt] = partial(refreshed_step, layer)
    if "torchao" in needed:
        peer = torchao_peer.linear(weight)
        contestants["torchao"] = partial(step, peer)
    yield contestants


def quantise_group() -> Group:
    """Codes by row, column and both, of which both have a target; then what training makes of gradients and inputs."""
    rows = [
        Comparison(
            f"quantise.{fmt}.{side}",
            f"{fmt} {side}",
            "copy",
            3.6 if side == "both" else None,
            f"{LABELS[fmt]} codes, {side} of a BF16 tensor, over a copy of it",
        )
        for fmt, sides in (("mxfp8", ("row", "col", "both")), ("hif8", ("row", "both")))
        for side in sides
    ]
    for name, made in (
        ("gradient", "MXFP8 gradient as training makes it: BF16 values by row and by column, over a copy of it"),
        ("input", "MXFP8 input as training makes it: BF16 values by row, codes by column, over a copy of it"),
    ):
        rows.append(Comparison(f"quantise.mxfp8.{name}", f"mxfp8 {name}", "copy", None, made))
    return Group("quantise", tuple(rows), turns(quantise_contestants))


def linear_group() -> Group:
    """Over BF16."""
    rows = [
        Comparison(
            f"linear.{fmt}.over_bf16",
            fmt,
            "bf16",
            target,
            f"{LABELS[fmt]} Linear, forward and backward with its refresh, over BF16 nn.Linear",
        )
        for fmt, target in (("mxfp8", 1.02), ("hif8", 1.04))
    ]
    return Group("linear", tuple(rows), turns(linear_contestants))


def linear_peer_group() -> Group:
    """Over torchao's emulation, in turns of its own: its many large temporaries slow down whoever comes after."""
    row = Comparison(
        "linear.mxfp8.over_torchao",
        "mxfp8",
        "torchao",
        0.588,
        "MXFP8 Linear, forward and backward, over torchao's emulated MXFP8Linear (FLOOR)",
    )
    return Group("linear, peers", (row,), turns(linear_contestants), peers={"torchao": torchao_peer.PEER})
