"""LowPrecisionLinear as a whole: the three GEMMs on independently quantised tensors, shapes, dtypes and bias."""

from __future__ import annotations

import pytest
import torch
from helpers.oracle import fake_quant, within_bound
from helpers.policies import FLOOR, FORMATS, RECIPES, linear, policy
from torch import nn

from quaver.errors import PlanError
from quaver.low_precision import replace_low_precision_linear


def backward(module, x, g):
    leaf = x.clone().requires_grad_()
    y = module(leaf)
    y.backward(g)
    return y.detach(), leaf.grad, module.weight.grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(96,), (1,), (3, 21), (2, 2, 16)], ids=str)
@pytest.mark.parametrize(("K", "N"), [(64, 96), (45, 51)])
@pytest.mark.parametrize("recipe_id", RECIPES)
def test_all_three_gemms_read_operands_quantised_along_their_contraction(recipe_id, K, N, shape, dtype):
    """The oracle quantises x, w and g itself, with third-party dtypes, and multiplies in FP64."""
    torch.manual_seed(N)
    w = torch.randn(N, K) * 0.1
    x, g = torch.randn(*shape, K).to(dtype), (torch.randn(*shape, N) * 1e-3).to(dtype)
    y, dx, dw = backward(linear(recipe_id, w), x, g)
    assert (y.shape, y.dtype) == ((*shape, N), dtype)
    assert (dx.shape, dx.dtype) == (x.shape, dtype)
    assert (dw.shape, dw.dtype) == ((N, K), torch.float32)  # at rest the weight is FP32
    x2, g2 = x.view(-1, K), g.view(-1, N)
    along_k = fake_quant(x2, 1, recipe_id), fake_quant(w, 1, recipe_id).t()
    along_n = fake_quant(g2, 1, recipe_id, gradient=True), fake_quant(w, 0, recipe_id)
    along_t = fake_quant(g2, 0, recipe_id, gradient=True).t(), fake_quant(x2, 0, recipe_id)
    assert within_bound(y.view(-1, N), *along_k).all()
    assert within_bound(dx.view(-1, K), *along_n).all()
    assert within_bound(dw.to(dtype), *along_t).all()


@pytest.mark.parametrize("recipe_id", FORMATS)
def test_leading_shapes_are_only_views(recipe_id):
    """[T, K], [B, S, K], one token without a token axis, and strided input: the same numbers."""
    torch.manual_seed(0)
    module, x = linear(recipe_id, torch.randn(96, 64)), torch.randn(12, 64).bfloat16()
    flat = module(x)
    assert torch.equal(module(x.view(3, 4, 64)), flat.view(3, 4, 96))
    assert torch.equal(module(x.t().contiguous().t()), flat)
    assert torch.equal(module(x[:1]), module(x[0]).view(1, 96))


@pytest.mark.parametrize("recipe_id", FORMATS)
@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 4)], ids=str)
def test_no_tokens(recipe_id, shape):
    module = linear(recipe_id, torch.randn(96, 64), torch.randn(96))
    y, dx, dw = backward(module, torch.randn(*shape, 64).bfloat16(), torch.zeros(*shape, 96).bfloat16())
    assert y.shape == (*shape, 96)
    assert dx.shape == (*shape, 64)
    assert torch.equal(dw, torch.zeros(96, 64))
    assert torch.equal(module.bias.grad, torch.zeros(96))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("recipe_id", FORMATS)
def test_the_bias_stays_in_high_precision_and_its_gradient_is_the_sum_over_tokens(recipe_id, dtype):
    torch.manual_seed(1)
    w, bias = torch.randn(96, 64), torch.randn(96)
    x, g = torch.randn(3, 21, 64).to(dtype), torch.randn(3, 21, 96).to(dtype)
    module = linear(recipe_id, w, bias)
    y, dx, dw = backward(module, x, g)
    plain = backward(linear(recipe_id, w), x, g)
    assert torch.equal(y, plain[0] + bias.to(dtype))
    assert torch.equal(dx, plain[1])
    assert torch.equal(dw, plain[2])
    assert type(module.bias) is nn.Parameter
    assert module.bias.dtype is module.bias.grad.dtype is torch.float32
    torch.testing.assert_close(
        module.bias.grad.double(),
        g.double().sum((0, 1)),
        rtol=2**-8 if dtype is torch.bfloat16 else 1e-5,
        atol=1e-5,
    )


def test_the_output_has_the_inputs_dtype_or_autocasts():
    module, x = linear(FLOOR, torch.randn(96, 64), torch.randn(96)), torch.randn(4, 64)
    assert module(x).dtype is torch.float32
    assert module(x.bfloat16()).dtype is torch.bfloat16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = module(x)
    assert y.dtype is torch.bfloat16
    assert torch.equal(y, module(x.bfloat16()))
    for dtype in (torch.float16, torch.float64):
        with pytest.raises(PlanError, match=rf"(?s){dtype} activations.*block\.proj"):
            module(x.to(dtype))


@pytest.mark.parametrize("recipe_id", FORMATS)
def test_a_wrong_width_is_named(recipe_id):
    with pytest.raises(PlanError, match=r"(?s)input of shape \(4, 65\).*block\.proj"):
        linear(recipe_id, torch.randn(96, 64))(torch.randn(4, 65))


def test_a_forward_before_the_weights_are_quantised_is_named():
    module = replace_low_precision_linear(nn.Linear(64, 96), fqn="block.proj", policy=policy(FLOOR))
    with pytest.raises(
        PlanError, match=r"(?s)before its weights were quantised.*block\.proj\.weight is a Parameter"
    ):
        module(torch.randn(4, 64))


@pytest.mark.parametrize("recipe_id", FORMATS)
def test_gradients_add_up_over_micro_steps(recipe_id):
    torch.manual_seed(2)
    w, xs = torch.randn(96, 64), torch.randn(3, 8, 64).bfloat16()
    module, singles = linear(recipe_id, w), []
    for x in xs:
        module(x).float().pow(2).sum().backward()
        alone = linear(recipe_id, w)
        alone(x).float().pow(2).sum().backward()
        singles.append(alone.weight.grad)
    assert torch.equal(module.weight.grad, singles[0] + singles[1] + singles[2])


def test_replacing_keeps_the_sources_parameters_names_and_mode():
    source = nn.Linear(64, 96).eval()
    source.weight.requires_grad_(False)
    module = replace_low_precision_linear(source, fqn="block.proj", policy=policy(FLOOR))
    assert dict(module.named_parameters()).keys() == dict(source.named_parameters()).keys()
    assert module.weight is source.weight
    assert module.bias is source.bias
    assert module.training is False
    assert isinstance(module, nn.Linear)
    assert "recipe=mxfp8_e4m3/mx_block/floor@1" in repr(module)


@pytest.mark.parametrize("recipe_id", FORMATS)
def test_a_second_derivative_is_refused(recipe_id):
    """A gradient penalty would have no gradient of its own."""
    module, x = linear(recipe_id, torch.randn(96, 64)), torch.randn(8, 64, requires_grad=True)
    (dx,) = torch.autograd.grad(module(x).pow(2).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        (x.sum() + dx.pow(2).sum()).backward()
