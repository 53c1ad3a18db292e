"""The module tree of a model with equal neighbours drawn once: 27 equal layers are one node with a count.

Equal means: same classes, names, parameter shapes and nothing else frozen, all the way down. Modules without
parameters (activations, rotary tables) are left out. May import: models, low_precision.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from quaver.low_precision import low_precision_modules
from quaver.models import iter_moe_layers
from quaver.planning.names import ranges


@dataclass(frozen=True)
class Node:
    """One module, or `count` equal neighbours in a list.

    Args:
        name: path from its parent; equal neighbours share one: "layers.{1-27}".
        kind: class name.
        count: how many modules this node stands for.
        parameters: elements of all their parameters; those shared with an earlier module count in both.
        shapes: the module's own parameters: name -> shape.
        note: what the numbers mean: "MoE, 64 experts, top-6"; empty where the class says it all.
        low_precision: whether its GEMMs run in eight bits.
        frozen: whether it has parameters of its own that do not train.
        children: nodes below it.
    """

    name: str
    kind: str
    count: int
    parameters: int
    shapes: dict[str, list[int]]
    note: str
    low_precision: bool
    frozen: bool
    children: tuple[Node, ...]

    def as_json(self) -> dict[str, Any]:
        """As nested dictionaries; what is empty or false is left out."""
        document: dict[str, Any] = {
            "name": self.name, "type": self.kind, "count": self.count, "parameters": self.parameters
        }  # fmt: skip
        more = {
            "shapes": self.shapes, "note": self.note, "low_precision": self.low_precision,
            "frozen": self.frozen, "children": [child.as_json() for child in self.children],
        }  # fmt: skip
        return document | {key: value for key, value in more.items() if value}


def structure(model: nn.Module) -> Node:
    """The collapsed tree of a model, its replacements installed or not; the meta device is fine."""
    notes = {id(module): _moe_note(module) for _, module in iter_moe_layers(model)}
    low = {id(module) for _, module in low_precision_modules(model)}
    return _node("", model, notes, low)


def _moe_note(layer: nn.Module) -> str:
    gate, experts = layer.get_submodule("gate"), layer.get_submodule("experts")
    counts = [getattr(experts, "num_experts", None), getattr(gate, "top_k", None)]
    parts = [text.format(n) for text, n in zip(("{} experts", "top-{}"), counts) if n is not None]
    return ", ".join(["MoE", *parts])


def _node(name: str, module: nn.Module, notes: dict[int, str], low: set[int]) -> Node:
    own = {key: p for key, p in module._parameters.items() if p is not None}
    below: list[Node] = []
    for child_name, child in module.named_children():
        if isinstance(child, nn.ModuleList):
            below += _merged(child_name, [_node(i, c, notes, low) for i, c in child.named_children()])
        else:
            below.append(_node(child_name, child, notes, low))
    children = tuple(child for child in below if child.parameters)
    return Node(
        name=name,
        kind=type(module).__name__,
        count=1,
        parameters=sum(p.numel() for p in module.parameters()),
        shapes={key: list(p.shape) for key, p in own.items()},
        note=notes.get(id(module), ""),
        low_precision=id(module) in low,
        frozen=any(not p.requires_grad for p in own.values()),
        children=children,
    )


def _merged(list_name: str, nodes: list[Node]) -> list[Node]:
    """The elements of a module list, each run of equal ones as one node."""
    runs: list[list[Node]] = []
    for node in nodes:
        if runs and _same(runs[-1][0], node):
            runs[-1].append(node)
        else:
            runs.append([node])
    return [
        replace(
            run[0],
            name=f"{list_name}.{ranges(int(node.name) for node in run)}",
            count=len(run),
            parameters=sum(node.parameters for node in run),
            note=next((child.note for child in run[0].children if child.note), ""),
        )
        for run in runs
    ]


def _same(a: Node, b: Node) -> bool:
    """Equal but for the name."""
    return replace(a, name="") == replace(b, name="")
