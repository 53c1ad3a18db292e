"""What an operator says to arguments that it does not take."""

from __future__ import annotations

import torch


class HarnessError(RuntimeError):
    """An operator was called in a way that the hardware's contract does not have."""


def want(condition: bool, message: str) -> None:
    """HarnessError unless the condition holds."""
    if not condition:
        raise HarnessError(message)


def absent(**arguments: object) -> None:
    """Arguments that no eight-bit path uses must be left alone."""
    for name, value in arguments.items():
        want(value is None, f"{name} has no meaning here")


def typed(name: str, tensor: torch.Tensor, *dtypes: torch.dtype) -> None:
    """HarnessError for another dtype."""
    want(tensor.dtype in dtypes, f"{name} is {tensor.dtype}, wanted {' or '.join(map(str, dtypes))}")


def shaped(name: str, tensor: torch.Tensor, *shape: int) -> None:
    """HarnessError for another shape."""
    want(tuple(tensor.shape) == shape, f"{name} is {tuple(tensor.shape)}, wanted {shape}")
