"""The collapsed tree: what counts as equal, what is left out, and that parameters add up."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from quaver.planning import Node, structure


class Experts(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.num_experts = number
        self.up = nn.Parameter(torch.empty(number, 8, 4))


class Router(nn.Linear):
    top_k = 3


class MoE(nn.Module):
    def __init__(self, experts: int) -> None:
        super().__init__()
        self.experts = Experts(experts)
        self.gate = Router(4, experts, bias=False)


class Layer(nn.Module):
    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp = mlp
        self.act = nn.SiLU()


class Model(nn.Module):
    def __init__(self, *mlps: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.layers = nn.ModuleList([Layer(mlp) for mlp in mlps])


def linear(width: int = 6) -> nn.Linear:
    return nn.Linear(4, width)


def names(node: Node) -> list[tuple[str, int]]:
    return [(child.name, child.count) for child in node.children]


@pytest.fixture(autouse=True)
def _on_meta() -> Any:
    with torch.device("meta"):
        yield


def test_equal_neighbours_are_one_node() -> None:
    tree = structure(Model(linear(), MoE(4), MoE(4), MoE(4)))
    assert (tree.kind, tree.name, tree.count) == ("Model", "", 1)
    assert names(tree) == [("embed", 1), ("layers.0", 1), ("layers.{1-3}", 3)]
    moe = tree.children[2]
    assert moe.parameters == 3 * (4 * 8 * 4 + 4 * 4)
    assert moe.note == "MoE, 4 experts, top-3"
    assert [child.kind for child in moe.children] == ["MoE"]  # the activation has no parameters
    (mlp,) = moe.children
    assert mlp.parameters == 4 * 8 * 4 + 4 * 4  # of one layer
    assert [(child.name, child.shapes) for child in mlp.children] == [
        ("experts", {"up": [4, 8, 4]}),
        ("gate", {"weight": [4, 4]}),
    ]
    assert (tree.children[1].note, tree.note) == ("", "")


@pytest.mark.parametrize(
    ("mlps", "wanted"),
    [
        ((4, 4, 8), ["layers.{0-1}", "layers.2"]),
        ((4, 8, 4), ["layers.0", "layers.1", "layers.2"]),  # neighbours only: the order is part of the truth
    ],
)
def test_other_shapes_are_other_nodes(mlps: tuple[int, ...], wanted: list[str]) -> None:
    tree = structure(Model(*[MoE(number) for number in mlps]))
    assert [child.name for child in tree.children[1:]] == wanted


def test_what_is_frozen_is_not_equal() -> None:
    model = Model(linear(), linear(), linear())
    model.layers[1].get_submodule("mlp").bias.requires_grad_(False)  # type: ignore[union-attr]
    tree = structure(model)
    assert [child.name for child in tree.children[1:]] == ["layers.0", "layers.1", "layers.2"]
    assert [child.children[0].frozen for child in tree.children[1:]] == [False, True, False]


def test_as_json_leaves_out_what_is_empty() -> None:
    document = structure(Model(linear(), linear())).as_json()
    assert document == {
        "name": "",
        "type": "Model",
        "count": 1,
        "parameters": 40 + 2 * 30,
        "children": [
            {
                "name": "embed",
                "type": "Embedding",
                "count": 1,
                "parameters": 40,
                "shapes": {"weight": [10, 4]},
            },
            {
                "name": "layers.{0-1}",
                "type": "Layer",
                "count": 2,
                "parameters": 60,
                "children": [
                    {
                        "name": "mlp",
                        "type": "Linear",
                        "count": 1,
                        "parameters": 30,
                        "shapes": {"weight": [6, 4], "bias": [6]},
                    }
                ],
            },
        ],
    }
