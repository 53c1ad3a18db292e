"""The calls of torch.ops.npu that a forward and backward pass makes, as data that can be replayed or changed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from helpers.npu_harness import OPERATORS


@dataclass(frozen=True)
class Call:
    """One call: every argument by name, and which of them were passed by position."""

    op: str
    positional: tuple[str, ...]
    arguments: dict[str, Any] = field(hash=False)

    def run(self, **changes: Any) -> list[torch.Tensor]:
        """Replays it with some arguments changed; returns its tensors."""
        arguments = {**self.arguments, **changes}
        args = [arguments.pop(name) for name in self.positional]
        return tree_leaves(getattr(torch.ops.npu, self.op)(*args, **arguments))

    def without(self, name: str) -> Call:
        """The call with one argument left out."""
        kept = {key: value for key, value in self.arguments.items() if key != name}
        return Call(self.op, tuple(key for key in self.positional if key != name), kept)

    def defaults(self) -> dict[str, Any]:
        """The schema's own values of arguments that may be left out."""
        arguments = getattr(torch.ops.npu, self.op).default._schema.arguments
        return {a.name: a.default_value for a in arguments if a.has_default_value()}

    @property
    def kind(self) -> tuple[Any, ...]:
        """What tells calls apart: shapes, dtypes, strides and plain values."""
        leaves = tree_leaves(list(self.arguments.values()))
        return (self.op, *((tuple(v.shape), v.dtype, v.stride()) if isinstance(v, torch.Tensor) else v for v in leaves))


class Spy:
    """Stands where a caller finds an operator; torch itself looks the operator's overloads up through it."""

    def __init__(self, operator: Any, called: Callable[..., Any]) -> None:
        self._operator, self._called = operator, called

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the spy was made for; it gets the operator first."""
        return self._called(self._operator, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._operator, name)


class Recorder:
    """While it lasts, keeps each kind of call once, as the caller spelled it; `spoil` raises in place of an operator.

    It stands where the caller finds the operator: torch itself drops arguments that equal the schema's default.
    """

    def __init__(self, spoil: dict[str, Exception] | None = None) -> None:
        self.calls: dict[tuple[Any, ...], Call] = {}
        self.spoil = spoil or {}
        self._kept: dict[str, Any] = {}

    def __enter__(self) -> Recorder:
        for name in OPERATORS:
            self._kept[name] = getattr(torch.ops.npu, name)
            setattr(torch.ops.npu, name, Spy(self._kept[name], functools.partial(self._called, name)))
        return self

    def __exit__(self, *_: object) -> None:
        for name, operator in self._kept.items():
            setattr(torch.ops.npu, name, operator)

    def _called(self, name: str, operator: Any, *args: Any, **kwargs: Any) -> Any:
        if name in self.spoil:
            raise self.spoil[name]
        names = [argument.name for argument in operator.default._schema.arguments]
        call = Call(name, tuple(names[: len(args)]), {**dict(zip(names, args)), **kwargs})
        self.calls.setdefault(call.kind, call)
        return operator(*args, **kwargs)
