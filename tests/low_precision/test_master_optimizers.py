"""Stock optimisers on MasterWeight: the very bits that they give on plain FP32 parameters."""

from __future__ import annotations

import pytest
import torch
from helpers.policies import FORMATS, mlp, policy
from torch import nn
from torch.optim.swa_utils import AveragedModel

from quaver.errors import StaleWeightError
from quaver.low_precision import MasterWeight, low_precision_linear, quantised_weights, refresh_stale


class Lion(torch.optim.Optimizer):
    """As users write their own: sign of an interpolated momentum, decoupled decay."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                p.data.mul_(1 - group["lr"] * 0.1)
                p.add_(torch.lerp(p.grad, m, 0.9).sign_(), alpha=-group["lr"])
                m.lerp_(p.grad, 0.01)


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "adamw-loop": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False, amsgrad=True),
    "adam-fused": lambda p: torch.optim.Adam(p, lr=1e-2, fused=True, weight_decay=0.1),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2),
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1),
    "sgd-foreach": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, foreach=True),
    "sgd-fused": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
    "rmsprop-foreach": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9, centered=True, foreach=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "adagrad-fused": lambda p: torch.optim.Adagrad(p, lr=1e-2, fused=True),
    "adagrad-foreach": lambda p: torch.optim.Adagrad(p, lr=1e-2, foreach=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "nadam-foreach": lambda p: torch.optim.NAdam(p, lr=1e-2, weight_decay=0.1, foreach=True),
    "radam": lambda p: torch.optim.RAdam(p, lr=1e-2),
    "radam-foreach": lambda p: torch.optim.RAdam(p, lr=1e-2, weight_decay=0.1, foreach=True),
    "adamax-foreach": lambda p: torch.optim.Adamax(p, lr=1e-2, foreach=True),
    "adadelta-foreach": lambda p: torch.optim.Adadelta(p, lr=1.0, foreach=True),
    "asgd": lambda p: torch.optim.ASGD(p, lr=1e-2, t0=1),
    "rprop-foreach": lambda p: torch.optim.Rprop(p, lr=1e-3, foreach=True),
    "lion": lambda p: Lion(p, lr=1e-3),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
}


class HandModel(nn.Module):
    """Plain FP32 masters; each forward quantises them anew, so nothing can be stale."""

    def __init__(self, source: nn.Sequential, bound):
        super().__init__()
        self.params = nn.ParameterList(
            nn.Parameter(t.clone()) for t in source.state_dict().values()
        )  # weight, bias, weight, bias
        self.bound = bound

    def forward(self, x):
        first, b0, second, b1 = self.params
        for index, (w, b) in enumerate(((first, b0), (second, b1))):
            x = Straight.apply(x, w, self.bound) + b.to(x.dtype)
            x = nn.functional.silu(x) if index == 0 else x
        return x


class Straight(torch.autograd.Function):
    """Quantises a plain master on the spot and gives its gradient to it."""

    @staticmethod
    def forward(ctx, x, w, bound):
        from quaver.low_precision import WeightSpec

        weight = nn.Parameter(MasterWeight(w.detach().clone(), WeightSpec("hand", "dense", bound.recipe)))
        weight.refresh()
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            y = low_precision_linear(leaf, weight, fqn="hand", recipe=bound.recipe)
        ctx.graph = (leaf, weight, y)
        return y.detach()

    @staticmethod
    def backward(ctx, g):
        leaf, weight, y = ctx.graph
        dx, dw = torch.autograd.grad(y, (leaf, weight), g)
        return dx, dw, None


def train(model, build, steps=4, *, after=lambda: None):
    optimizer = build(list(model.parameters()))
    losses = []
    for step in range(steps):
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(step)).bfloat16()
        loss = model(x).float().pow(2).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        after()
        losses.append(loss.detach())
    return optimizer, losses


@pytest.mark.parametrize("name", list(OPTIMIZERS))
@pytest.mark.parametrize("recipe_id", FORMATS)
def test_masters_and_losses_equal_a_hand_loop_on_plain_parameters(recipe_id, name):
    bound = policy(recipe_id)
    model = mlp(bound)
    hand = HandModel(model, policy(recipe_id))
    optimizer, losses = train(model, OPTIMIZERS[name], after=lambda: refresh_stale(model, after_step=True))
    _, wanted = train(hand, OPTIMIZERS[name])
    assert losses == wanted
    assert len({float(loss) for loss in losses}) == 4  # it did train
    for found, plain in zip(model.state_dict().values(), hand.params):
        assert torch.equal(found, plain)
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                assert type(value) is torch.Tensor
                assert value.dtype is torch.float32


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_a_step_makes_its_weights_stale_until_they_are_refreshed(name):
    """The same without a refresh: the second forward raises instead of using the old codes."""
    with pytest.raises(StaleWeightError, match=r"(?s)written since.*where: 0\.weight.*quaver\.attach"):
        train(mlp(policy(FORMATS[0])), OPTIMIZERS[name])


def test_a_step_that_changes_nothing_is_not_mistaken_for_one():
    """No gradients: no write, nothing stale, nothing refreshed."""
    model = mlp(policy(FORMATS[0]))
    torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True).step()
    assert refresh_stale(model, after_step=True) == []
    assert model(torch.randn(2, 64)).shape == (2, 64)


def test_gradients_are_plain_fp32_tensors():
    model = mlp(policy(FORMATS[1]))
    model(torch.randn(4, 64).bfloat16()).float().sum().backward()
    for parameter in model.parameters():
        assert type(parameter.grad) is torch.Tensor
        assert parameter.grad.dtype is torch.float32
        assert parameter.grad.shape == parameter.shape


@pytest.mark.parametrize("recipe_id", FORMATS)
def test_an_averaged_model_is_a_model_of_its_own(recipe_id):
    """EMA by torch: a deep copy whose weights are written from outside; stale until refreshed."""
    model = mlp(policy(recipe_id))
    averaged = AveragedModel(model)
    averaged.update_parameters(model)
    train(model, OPTIMIZERS["sgd"], steps=1, after=lambda: refresh_stale(model, after_step=True))
    x = torch.randn(4, 64).bfloat16()
    averaged.update_parameters(model)
    with pytest.raises(StaleWeightError):
        averaged(x)
    refresh_stale(averaged, after_step=False)
    mean = {k: v.clone() for k, v in averaged.module.state_dict().items()}
    fresh = mlp(policy(recipe_id))
    fresh.load_state_dict(mean)
    assert torch.equal(averaged(x), fresh(x))
    assert not torch.equal(averaged(x), model(x))
    assert set(quantised_weights(averaged)) == {"0.weight", "2.weight"}


def scaler_step(optimizer, scaler, model, scale):
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    loss = model(x).float().pow(2).mean()
    scaler.scale(loss).backward()
    if scale is not None:
        next(model.parameters()).grad[0, 0] = scale
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


@pytest.mark.parametrize("kind", [{"fused": True}, {"foreach": True}])
def test_a_step_that_a_gradient_scaler_skips_is_not_a_refresh(kind):
    """The fused kernel is called even then, and told to write nothing."""
    model = mlp(policy(FORMATS[1]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **kind)
    optimizer.register_step_post_hook(lambda *_: refresh_stale(model, after_step=True))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def counts():
        return {weight.state.refreshes for _, weight in quantised_weights(model).values()}

    for scale, wanted in (
        (None, 1),
        (float("inf"), 1),
        (None, 2),
        (float("nan"), 2),
        (float("inf"), 2),
        (None, 3),
    ):
        before = [p.detach().clone() for p in model.parameters()]
        scaler_step(optimizer, scaler, model, scale)
        moved = [not torch.equal(p, old) for p, old in zip(model.parameters(), before)]
        assert set(moved) == {scale is None}
        assert counts() == {wanted}


def test_a_write_beside_a_skipped_step_counts_as_one():
    model = mlp(policy(FORMATS[0]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler_step(optimizer, scaler, model, float("inf"))
    with torch.no_grad():
        model[0].weight.mul_(2)
    model[2].weight.master.mul_(2)
    assert refresh_stale(model, after_step=True) == ["0.weight", "2.weight"]
    assert [weight.state.refreshes for _, weight in quantised_weights(model).values()] == [1, 1]
