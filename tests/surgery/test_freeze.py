"""Freezing by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from quaver.errors import PlanError
from quaver.surgery import freeze


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3))
        self.head = nn.Linear(4, 8, bias=False)


def trainable(model: nn.Module) -> list[str]:
    return [name for name, p in model.named_parameters() if p.requires_grad]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_by_parameter_by_owner_and_by_block(device: str) -> None:
    with torch.device(device):
        model = Model()
    hits = freeze(model, ["layers.0.0.bias", "embed", "layers.{2}"])
    assert hits == {
        "layers.0.0.bias": ["layers.0.0.bias"],
        "embed": ["embed.weight"],
        "layers.{2}": ["layers.2.0.weight", "layers.2.0.bias"],
    }
    assert trainable(model) == ["layers.0.0.weight", "layers.1.0.weight", "layers.1.0.bias", "head.weight"]


def test_no_match_freezes_nothing_and_suggests() -> None:
    model = Model()
    with pytest.raises(PlanError, match=r"did you mean .*head") as caught:
        freeze(model, ["embed", "heads"])
    assert "'heads'" in str(caught.value)
    assert len(trainable(model)) == 8


def test_a_module_without_parameters_is_no_match() -> None:
    with pytest.raises(PlanError, match=r"layers\.0\.1 holds none"):
        freeze(Model(), ["layers.*.1"])


def test_a_tied_parameter_is_frozen_under_both_names() -> None:
    model = Model()
    model.head.weight = model.embed.weight
    assert freeze(model, ["head"]) == {"head": ["head.weight"]}
    assert not model.embed.weight.requires_grad


def test_everything_and_nothing() -> None:
    model = Model()
    assert freeze(model, []) == {}
    freeze(model, ["**"])
    assert trainable(model) == []


def test_frozen_parameters_get_no_gradient() -> None:
    model = Model()
    freeze(model, ["layers.1"])
    x = model.embed(torch.arange(8))
    for layer in model.layers:
        x = layer(x)
    model.head(x).sum().backward()
    assert model.layers[1][0].weight.grad is None
    assert model.layers[0][0].weight.grad is not None
