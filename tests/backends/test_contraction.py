"""Scale blocks run along the axis that the GEMM contracts: read off shapes and values, not off names."""

from __future__ import annotations

import pytest
import torch
from helpers.experts import grouped_weight, routing_of
from helpers.oracle import decode
from helpers.policies import FLOOR, HIF8, linear, policy
from helpers.recording import RecordingBackend

from quaver.low_precision import low_precision_grouped_swiglu

# lengths that no two axes share, so that a length names an axis
T, K, N = 96, 64, 160
COUNTS, H, F2 = [64, 0, 32, 96], 128, 320  # S = 192 rows; gate_up [4, 320, 128], down [4, 128, 160]


def recorded(recipe_id):
    """Every GEMM of one dense and one grouped training pass."""
    backend = RecordingBackend()
    bound = policy(recipe_id, backend)
    torch.manual_seed(0)
    x = torch.randn(T, K).bfloat16().requires_grad_()
    linear(bound, torch.randn(N, K), fqn="dense")(x).float().pow(2).sum().backward()
    gate_up = grouped_weight(torch.randn(4, F2, H), bound, "gate_up")
    down = grouped_weight(torch.randn(4, H, F2 // 2), bound, "down")
    index = routing_of(COUNTS)
    tokens = torch.randn(index.shape[0], H).bfloat16().requires_grad_()
    y = low_precision_grouped_swiglu(
        tokens, index, torch.rand(index.shape), gate_up, down, sites=("gate_up", "down"), recipe=bound.recipe
    )
    y.float().pow(2).sum().backward()
    assert sorted((m.site.fqn, m.site.gemm) for m in backend.multiplied) == sorted(
        (fqn, gemm) for fqn in ("dense", "gate_up", "down") for gemm in ("fprop", "dgrad", "wgrad")
    )
    return backend.multiplied


def contracted(m):
    """The length that both operands have and the output has not (in wgrad the tokens)."""
    kept = set(m.out.shape)
    (length,) = {n for n in m.left.shape[-2:] if n in m.right.shape[-2:] and n not in kept}
    return length


def blocked_axis(operand, ends):
    """The one axis along which there are fewer scales than codes."""
    axes = [i for i, (n, s) in enumerate(zip(operand.data.shape, operand.scale.shape)) if n != s]
    assert len(axes) == 1
    (axis,) = axes
    groups = [operand.data.shape[axis]] if ends is None else [b - a for a, b in zip([0, *ends], ends)]
    assert operand.scale.shape[axis] == sum(-(-n // 32) for n in groups)
    return axis


def test_blocks_run_along_the_contracted_axis_in_all_six_kinds_of_gemm():
    for m in recorded(FLOOR):
        ends = m.ends if m.site.gemm == "wgrad" else None
        for operand in (m.left, m.right):
            axis = blocked_axis(operand, ends)
            assert operand.data.shape[axis] == contracted(m), (m.site, tuple(operand.shape))


def test_the_blocks_hold_the_values_that_their_scales_say():
    """An amax of a block lies in [256, 512) times its scale, if the blocks run along the right axis."""
    for m in recorded(FLOOR):
        ends = m.ends if m.site.gemm == "wgrad" else None
        for operand in (m.left, m.right):
            axis, values = blocked_axis(operand, ends), decode(operand, ends).abs()
            amax = torch.stack([part.amax(axis) for part in values.split(32, axis)], axis)
            wanted = torch.floor(torch.log2(amax)) - 8 + 127
            assert torch.equal(wanted[amax > 0], operand.scale.double()[amax > 0])


def test_hif8_scales_have_no_axis_and_experts_have_their_own():
    shapes = {(m.site.fqn, m.site.gemm): (m.left.scale.shape, m.right.scale.shape) for m in recorded(HIF8)}
    one, each = torch.Size([]), torch.Size([4])
    for fqn in ("dense", "gate_up", "down"):
        weight = one if fqn == "dense" else each
        assert shapes[fqn, "fprop"] == (one, weight)
        assert shapes[fqn, "dgrad"] == (one, weight)
        assert shapes[fqn, "wgrad"] == (one, one)


@pytest.mark.parametrize("recipe_id", [FLOOR, HIF8])
def test_every_gemm_saw_eight_bit_operands(recipe_id):
    for m in recorded(recipe_id):
        assert m.left.data.dtype is torch.uint8
        assert m.right.data.dtype is torch.uint8
        assert m.left.format == m.right.format == recipe_id.split("/")[0]
