"""Whole layers give the same bits with the kernels and without: outputs, all gradients, and codes."""

from __future__ import annotations

import pytest
import torch
from helpers.experts import grouped_weight, routing_of
from helpers.policies import RECIPES, linear, policy

from quaver.backends import QuantizationRole, ReferenceBackend
from quaver.low_precision import low_precision_grouped_swiglu


def dense_bits(recipe_id, dtype, shape, poison=None):
    torch.manual_seed(3)
    T, K, N = shape
    module = linear(recipe_id, torch.randn(N, K) * 0.1)
    x, g = torch.randn(T, K).to(dtype), torch.randn(T, N).to(dtype)
    if poison is not None:
        x[T // 2, K // 3] = poison
    x.requires_grad_()
    y = module(x)
    y.backward(g)
    physical = module.weight.physical
    return [y.detach(), x.grad, module.weight.grad, *(physical[name] for name in sorted(physical))]


def expert_bits(recipe_id, dtype, counts):
    torch.manual_seed(4)
    bound, experts = policy(recipe_id), len(counts)
    gate_up = grouped_weight(torch.randn(experts, 128, 64) * 0.1, bound, "gate_up")
    down = grouped_weight(torch.randn(experts, 64, 64) * 0.1, bound, "down")
    index = routing_of(list(counts))
    x = torch.randn(index.shape[0], 64).to(dtype).requires_grad_()
    weights = torch.rand(index.shape, requires_grad=True)
    y = low_precision_grouped_swiglu(
        x, index, weights, gate_up, down, sites=("gate_up", "down"), recipe=bound.recipe
    )
    y.backward(torch.randn_like(y))
    return [y.detach(), x.grad, weights.grad, gate_up.grad, down.grad]


def as_bits(tensors):
    return [t.contiguous().view(torch.uint8) for t in tensors]


def assert_same(paths, compute):
    paths("off")
    wanted = compute()
    paths("native")
    found = compute()
    assert len(found) == len(wanted)
    for one, other in zip(as_bits(found), as_bits(wanted)):
        assert torch.equal(one, other)


@pytest.mark.parametrize("recipe_id", RECIPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(64, 64, 96), (65, 96, 64), (257, 192, 128), (7, 33, 47), (512, 512, 256)])
def test_linear(paths, recipe_id, dtype, shape):
    assert_same(paths, lambda: dense_bits(recipe_id, dtype, shape))


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e-38, 2.0**-120])
@pytest.mark.parametrize("recipe_id", RECIPES)
def test_linear_with_a_block_that_bf16_cannot_hold(paths, recipe_id, poison):
    """NaN payloads may differ, so NaN counts as NaN."""

    def compute():
        return [t.float().nan_to_num(12345.0) if t.is_floating_point() else t
                for t in dense_bits(recipe_id, torch.bfloat16, (64, 128, 64), poison)]  # fmt: skip

    assert_same(paths, compute)


@pytest.mark.parametrize("recipe_id", RECIPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("counts", [(3, 0, 5), (64, 31, 33, 0, 1), (200, 100, 300)])
def test_experts(paths, recipe_id, dtype, counts):
    assert_same(paths, lambda: expert_bits(recipe_id, dtype, counts))


@pytest.mark.parametrize("recipe_id", RECIPES)
@pytest.mark.parametrize("role", list(QuantizationRole))
@pytest.mark.parametrize("ends", [None, [0, 31, 64, 64, 97]])
def test_codes_that_were_not_written_come_from_the_values(paths, recipe_id, role, ends):
    """Whatever a role leaves out, `data` is what the torch codec gives; a lossy block too."""
    spec = policy(recipe_id).recipe.quantizer(role).spec
    group_list = None if ends is None else torch.tensor(ends)
    for poison in (0.0, float("nan"), 2.0**-125):
        x = torch.randn(97, 160).bfloat16()
        x[40, 64:96] = poison
        x[50, 3] = -0.0
        results = []
        for path in ("off", "native"):
            paths(path)
            results.append(ReferenceBackend().quantize_dual(x, spec=spec, role=role, group_list=group_list))
        for plain, fast in zip(*results):
            assert fast.shape == plain.shape
            assert torch.equal(fast.scale, plain.scale)
            assert torch.equal(fast.data, plain.data)
            assert fast.data is fast.data
