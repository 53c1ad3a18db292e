"""Every GEMM reads *quantised* operands: an element moves its outputs by whole quanta or not at all.

The data are chosen so that every number can be written down without a quantiser: magnitudes 1 to 1.75 in steps of
1/8, which is the quantum there in E4M3 under a block amax in [1, 2), and in HiF8 under scale 1 (one element at the
format maximum makes it 1). All sums are exact in FP32, so outputs are compared bit for bit.
"""

from __future__ import annotations

import pytest
import torch
from helpers.policies import FORMATS, HIF8, linear, policy

from quaver.backends import GemmSite, QuantizationRole

Role = QuantizationRole
T, K, N = 64, 96, 32
QUANTUM = 0.125
BOTTOM = 1.25 - QUANTUM / 2 + 2**-7  # one BF16 step above the lower edge of the cell of 1.25
BELOW = BOTTOM + QUANTUM - 2**-6  # less than a quantum further, the same cell
ABOVE = BOTTOM + QUANTUM  # one quantum further, the cell of 1.375


def grid(shape, seed, top):
    """Random signs and magnitudes in {1, 1.125, .., 1.75}; in the last corner `top`, where a format needs one."""
    generator = torch.Generator().manual_seed(seed)
    values = 1 + torch.randint(0, 7, shape, generator=generator) * QUANTUM
    values *= torch.randint(0, 2, shape, generator=generator) * 2 - 1
    if top is not None:
        values[(-1,) * len(shape)] = top
    return values


def at(values, index, value):
    out = values.clone()
    out[index] = value
    return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("role", ["input", "weight", "grad_output"])
@pytest.mark.parametrize("recipe_id", FORMATS)
def test_dense(recipe_id, role, dtype):
    """input: fprop and wgrad; weight: fprop and dgrad; grad_output: dgrad and wgrad; the third never moves."""
    hif8 = recipe_id == HIF8
    plain = {
        "input": grid((T, K), 0, 15.0 if hif8 else None),
        "weight": grid((N, K), 1, 15.0 if hif8 else None),
        "grad_output": grid((T, N), 2, 224.0 if hif8 else None),
    }

    def outputs(changed, index, value):
        """(y, dx, dw) of the module with one element of one tensor set."""
        data = {**plain, changed: at(plain[changed], index, value)}
        module = linear(recipe_id, data["weight"])
        x = data["input"].to(dtype, copy=True).requires_grad_()
        y = module(x)
        y.backward(data["grad_output"].to(dtype))
        return y.detach(), x.grad, module.weight.grad

    def by_hand(changed, index, value):
        data = {**plain, changed: at(plain[changed], index, value)}
        x, w, g = (data[name].double() for name in ("input", "weight", "grad_output"))
        return tuple(exact.to(dtype) for exact in (x @ w.t(), g @ w, g.t() @ x))

    index = (5, 7)
    bottom = outputs(role, index, BOTTOM)
    for found, wanted in zip(bottom, by_hand(role, index, 1.25)):
        assert torch.equal(found.to(dtype), wanted)
    for found, wanted in zip(outputs(role, index, BELOW), bottom):
        assert torch.equal(found, wanted)
    above = outputs(role, index, ABOVE)
    for found, wanted in zip(above, by_hand(role, index, 1.375)):
        assert torch.equal(found.to(dtype), wanted)
    moved = [not torch.equal(a, b) for a, b in zip(bottom, above)]
    assert moved == {"input": [1, 0, 1], "weight": [1, 1, 0], "grad_output": [0, 1, 1]}[role]


COUNTS = [0, 1, 31, 32, 33]


@pytest.mark.parametrize("layout", ["NN", "NT", "TN"])
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("recipe_id", FORMATS)
def test_grouped(recipe_id, layout, side):
    """Both operands of the three grouped GEMMs, one element of the group of 33 tokens or of its expert."""
    hif8, recipe = recipe_id == HIF8, policy(recipe_id).recipe
    ends, rows, experts = torch.tensor(COUNTS).cumsum(0), sum(COUNTS), len(COUNTS)
    roles = {
        "NN": (Role.INPUT_FWD, Role.WEIGHT_FWD),
        "NT": (Role.GRAD_OUTPUT, Role.WEIGHT_BWD),
        "TN": (Role.GRAD_OUTPUT, Role.INPUT_BWD),
    }[layout]
    orientations = {"NN": ("row", "col"), "NT": ("row", "row"), "TN": ("col", "col")}[layout]
    shapes = {
        "NN": ((rows, K), (experts, K, N)),
        "NT": ((rows, N), (experts, K, N)),
        "TN": ((rows, N), (rows, K)),
    }[layout]
    plain = [
        grid(shape, seed, (224.0 if role is Role.GRAD_OUTPUT else 15.0) if hif8 else None)
        for seed, (shape, role) in enumerate(zip(shapes, roles))
    ]
    if hif8 and layout != "TN":
        plain[1][:, -1, -1] = 15.0  # one scale an expert
    index = (80, 7) if plain[side].ndim == 2 else (4, 9, 7)

    def output(value):
        data = [at(t, index, value) if i == side else t for i, t in enumerate(plain)]
        left, right = (
            recipe.quantizer(role).quantize(
                t, orientation=orientation, group_list=ends if layout == "TN" else None
            )
            for t, role, orientation in zip(data, roles, orientations)
        )
        site = GemmSite("experts.w", {"NN": "fprop", "NT": "dgrad", "TN": "wgrad"}[layout])
        return recipe.backend.low_precision_grouped_matmul(
            left, right, ends, layout=layout, output_dtype=torch.float32, site=site
        )

    def by_hand(value):
        a, b = (at(t, index, value).double() if i == side else t.double() for i, t in enumerate(plain))
        spans = list(zip([0, *ends.tolist()], ends.tolist()))
        if layout == "TN":
            return torch.stack([a[s:e].t() @ b[s:e] for s, e in spans]).float()
        return torch.cat(
            [a[s:e] @ (b[i] if layout == "NN" else b[i].t()) for i, (s, e) in enumerate(spans)]
        ).float()

    bottom, above = output(BOTTOM), output(ABOVE)
    assert torch.equal(bottom, by_hand(1.25))
    assert torch.equal(output(BELOW), bottom)
    assert torch.equal(above, by_hand(1.375))
    assert not torch.equal(above, bottom)
