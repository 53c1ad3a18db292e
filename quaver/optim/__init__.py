"""Optimiser: FP32 AdamW groups, the learning-rate schedule and the gradient norm. Imports torch and
errors."""

from __future__ import annotations

from quaver.optim.adamw import build_adamw
from quaver.optim.grad_norm import clip_, gradient_norm
from quaver.optim.inner import inner_optimizer
from quaver.optim.schedule import learning_rate, warmup_steps_from_ratio

__all__ = ["build_adamw", "clip_", "gradient_norm", "inner_optimizer", "learning_rate", "warmup_steps_from_ratio"]
