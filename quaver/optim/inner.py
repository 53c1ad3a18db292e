"""The torch optimiser inside a wrapper, which is the one whose steps can be followed. May import: errors."""

from __future__ import annotations

from typing import Any

import torch

from quaver.errors import PlanError


def inner_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """The torch optimiser inside a wrapper such as accelerate's, whose own `step` calls it.

    Raises:
        PlanError: neither it nor anything that it wraps has step hooks.
    """
    inner = optimizer
    while not _has_hooks(inner) and isinstance(getattr(inner, "optimizer", None), torch.optim.Optimizer):
        inner = inner.optimizer
    if not _has_hooks(inner):
        raise PlanError(
            f"a {type(optimizer).__name__} has no step hooks",
            where="optimizer",
            remedy="give the torch optimiser inside",
        )
    return inner


def _has_hooks(optimizer: Any) -> bool:
    return "_optimizer_step_post_hooks" in getattr(optimizer, "__dict__", {})
