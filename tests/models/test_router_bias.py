"""The router bias against known answers, and the ways in which tokens are counted twice or not at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import TINY
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from quaver.errors import CheckpointError, PlanError
from quaver.models import RouterBias, from_hf_config

EXPERTS = 4


class Router(nn.Module):
    """Chooses what it is told: token t goes to the experts in `plan[t]`."""

    def __init__(self, plan: list[list[int]], bias_dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(EXPERTS, 2))
        self.e_score_correction_bias = nn.Buffer(torch.zeros(EXPERTS, dtype=bias_dtype))
        self.plan = plan

    def forward(self, x_TH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        indices = torch.tensor(self.plan)
        return x_TH @ self.weight.T, torch.ones(indices.shape), indices


class Layer(nn.Module):
    def __init__(self, plan: list[list[int]]) -> None:
        super().__init__()
        self.gate = Router(plan)
        self.experts = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits, _, _ = self.gate(x)
        return self.experts(x) + logits.sum()


class Model(nn.Module):
    def __init__(self, *plans: list[list[int]], reentrant: bool | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(plan) for plan in plans)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) if self.reentrant is None else checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


# Six tokens, two choices each: loads 5, 4, 3, 0; mean 3. Signs -, -, 0, +.
PLAN = [[0, 1], [0, 1], [0, 1], [0, 1], [0, 2], [2, 2]]


def step(model: nn.Module, times: int = 1) -> None:
    for _ in range(times):
        model(torch.ones(6, 2, requires_grad=True)).sum().backward()


def test_known_update() -> None:
    model = Model(PLAN)
    router = RouterBias(model)
    step(model)
    (load,) = router.update(0.25)
    assert load.fqn == "layers.0"
    assert load.counts == (5, 4, 3, 0)
    assert load.max_violation == pytest.approx(5 / 3 - 1)
    assert load.dead_experts == (3,)
    bias = model.layers[0].gate.e_score_correction_bias
    assert bias.tolist() == [-0.25, -0.25, 0.0, 0.25]
    assert bias.dtype == torch.float32
    assert "layers.0.gate.e_score_correction_bias" in model.state_dict()


def test_the_bias_is_updated_in_place_and_adds_up_where_bfloat16_would_stall() -> None:
    model = Model(PLAN)
    router = RouterBias(model)
    bias = model.layers[0].gate.e_score_correction_bias
    bias[3] = 0.6
    for _ in range(10):
        step(model)
        router.update(0.001)
    assert model.layers[0].gate.e_score_correction_bias is bias
    assert float(bias[3]) == pytest.approx(0.61, abs=1e-6)
    assert float(bias[0]) == pytest.approx(-0.01, abs=1e-6)


def test_micro_steps_add_up_and_the_sign_sees_their_sum() -> None:
    model = Model(PLAN)
    router = RouterBias(model)
    step(model, times=3)
    assert router.loads()[0].counts == (15, 12, 9, 0)
    router.update(1.0)
    assert model.layers[0].gate.e_score_correction_bias.tolist() == [-1.0, -1.0, 0.0, 1.0]
    assert router.loads()[0].counts == (0, 0, 0, 0)


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_activation_checkpointing_counts_each_token_once(reentrant: bool | None) -> None:
    """Both kinds run a router twice for one micro-step; reentrant's first run has gradients off."""
    model = Model(PLAN, PLAN, reentrant=reentrant)
    calls: list[int] = []
    model.layers[0].gate.register_forward_hook(lambda *a: calls.append(1))
    router = RouterBias(model)
    step(model, times=2)
    assert len(calls) == (2 if reentrant is None else 4)
    assert [load.counts for load in router.loads()] == [(10, 8, 6, 0)] * 2


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_evaluation_is_not_counted(reentrant: bool | None) -> None:
    model = Model(PLAN, reentrant=reentrant)
    router = RouterBias(model)
    with torch.no_grad():
        model(torch.ones(6, 2))
    with torch.inference_mode():
        model(torch.ones(6, 2))
    model.eval()
    model(torch.ones(6, 2))
    assert router.loads()[0].counts == (0, 0, 0, 0)
    model.train()
    step(model)
    assert router.loads()[0].counts == (5, 4, 3, 0)


def test_a_forward_that_fails_does_not_upset_what_follows() -> None:
    model = Model(PLAN)
    router = RouterBias(model)
    with torch.no_grad(), pytest.raises(RuntimeError):
        model(torch.ones(6, 3))  # wrong width
    model.layers[0](torch.ones(6, 2))  # a layer called by itself: its own gradient mode counts
    assert router.loads()[0].counts == (5, 4, 3, 0)


def test_discard_forgets_a_skipped_step() -> None:
    model = Model(PLAN)
    router = RouterBias(model)
    step(model)
    router.discard()
    assert router.loads()[0].counts == (0, 0, 0, 0)
    assert not model.layers[0].gate.e_score_correction_bias.any()


def test_rate_zero_reports_and_moves_nothing() -> None:
    model = Model(PLAN)
    router = RouterBias(model)
    step(model)
    assert router.update(0.0)[0].counts == (5, 4, 3, 0)
    assert not model.layers[0].gate.e_score_correction_bias.any()
    assert router.loads()[0].counts == (0, 0, 0, 0)


def test_a_perfect_balance_moves_nothing() -> None:
    model = Model([[0, 1], [2, 3]])
    router = RouterBias(model)
    step(model)
    (load,) = router.update(0.5)
    assert load.max_violation == 0.0
    assert load.dead_experts == ()
    assert not model.layers[0].gate.e_score_correction_bias.any()


def test_a_router_that_did_not_run_is_an_error_and_nothing_moves() -> None:
    model = Model(PLAN, PLAN)
    router = RouterBias(model)
    model.layers[0](torch.ones(6, 2)).sum().backward()
    with pytest.raises(PlanError, match="not run") as caught:
        router.update(0.5)
    assert caught.value.where == "layers.1.gate"
    assert not model.layers[0].gate.e_score_correction_bias.any()


def test_a_frozen_router_is_left_alone() -> None:
    model = Model(PLAN, PLAN)
    model.layers[0].gate.weight.requires_grad_(False)
    model.layers[0].gate.e_score_correction_bias.fill_(0.125)
    router = RouterBias(model)
    assert router.layers == ("layers.1",)
    step(model)
    router.update(0.5)
    assert model.layers[0].gate.e_score_correction_bias.tolist() == [0.125] * 4


def test_a_bias_in_another_dtype_is_refused() -> None:
    model = Model(PLAN)
    model.layers[0].gate = Router(PLAN, torch.bfloat16)
    with pytest.raises(PlanError, match=r"torch\.bfloat16"):
        RouterBias(model)


def test_a_router_without_a_bias_gives_statistics_only() -> None:
    model = Model(PLAN)
    del model.layers[0].gate.e_score_correction_bias
    router = RouterBias(model)
    step(model)
    with pytest.raises(PlanError, match="no bias"):
        router.update(0.1)
    assert router.update(0.0)[0].counts == (5, 4, 3, 0)


def test_a_router_of_another_form_is_refused() -> None:
    model = Model(PLAN)
    model.layers[0].gate = nn.Linear(2, EXPERTS)
    RouterBias(model)
    with pytest.raises(PlanError, match="logits, weights, indices"):
        model.layers[0].gate(torch.ones(6, 2))


def test_close_removes_every_hook() -> None:
    model = Model(PLAN)
    router = RouterBias(model)
    router.close()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_state_survives_a_round_trip_in_the_middle_of_a_step() -> None:
    first, second = Model(PLAN), Model(PLAN)
    router, other = RouterBias(first), RouterBias(second)
    step(first)
    state = router.state_dict()
    step(first)
    assert state["layers.0"].tolist() == [5, 4, 3, 0]  # a copy, not a view
    other.load_state_dict(state)
    step(second)
    assert other.loads() == router.loads()


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"layers.0": torch.zeros(4, dtype=torch.int64), "layers.9": torch.zeros(4, dtype=torch.int64)},
        {"layers.0": torch.zeros(5, dtype=torch.int64)},
        {"layers.0": torch.zeros(4)},
    ],
)
def test_a_state_that_does_not_fit_is_refused(state: dict[str, torch.Tensor]) -> None:
    with pytest.raises(CheckpointError):
        RouterBias(Model(PLAN)).load_state_dict(state)


def _hf_model(mode: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model = from_hf_config("deepseek_v3", config_overrides={**TINY, "use_cache": False})
    if mode != "off":
        model.activation_checkpointing_enable({"use_reentrant": mode == "reentrant"})
        model.enable_input_require_grads()
    return model


@pytest.mark.parametrize("mode", ["off", "full", "reentrant"])
def test_the_real_router_counts_once_and_the_bias_steers_the_choice(mode: str) -> None:
    model = _hf_model(mode)
    router = RouterBias(model)
    ids = torch.randint(0, 128, (2, 16))
    seen: dict[int, torch.Tensor] = {}

    def watch(index: int) -> Callable[..., None]:
        def hook(gate: nn.Module, args: Any, output: Any) -> None:
            seen.setdefault(index, output[2].detach().clone())

        return hook

    for index in (1, 2):
        model.model.layers[index].mlp.gate.register_forward_hook(watch(index))
    model(ids, labels=ids).loss.backward()
    assert router.layers == ("model.layers.1.mlp", "model.layers.2.mlp")
    for index, load in zip((1, 2), router.loads()):
        assert load.counts == tuple(torch.bincount(seen[index].flatten(), minlength=EXPERTS).tolist())
        assert sum(load.counts) == 2 * 16 * 2
    # An expert that every token is made to choose has twice the mean load. The updates undo that.
    model.model.layers[1].mlp.gate.e_score_correction_bias[0] = 0.5
    router.discard()
    violations = []
    for _ in range(60):
        model(ids, labels=ids)
        violations.append(router.update(0.01)[0].max_violation)
    assert violations[0] == 1.0
    assert min(violations[-10:]) < 0.5
