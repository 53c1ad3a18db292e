"""One optimiser step, in the order in which it happens. The file to read first.

    for each micro-batch:   forward -> loss / global tokens -> backward        (eight-bit GEMMs, FP32 reduce)
    finite?  no -> skip:    gradients dropped; master, moments, codes, schedule stay as they were
    norm -> clip -> lr -> optimizer.step (FP32 masters; then each weight is quantised once) -> router bias

May import: data, models, optim, assembly.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from quaver.assembly import Assembly
from quaver.config import OptimizerConfig
from quaver.data import Batch
from quaver.distributed import gather_rows, set_gradient_sync, sum_replicated
from quaver.models import summed_nats
from quaver.optim import clip_, gradient_norm, learning_rate, warmup_steps_from_ratio


@dataclass(frozen=True)
class StepResult:
    """What one step reports.

    Args:
        loss: mean nats per token over the step's global batch.
        grad_norm: L2 norm before clipping.
        lr: the learning rate that was used, or would have been.
        tokens: label tokens of the step, over all ranks.
        skipped: True if loss or norm was not finite and nothing was updated.
        without_gradient: parameters that train but got no gradient: a forward pass went around them.
    """

    loss: float
    grad_norm: float
    lr: float
    tokens: int
    skipped: bool
    without_gradient: tuple[str, ...] = ()


def token_nats(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Summed negative log likelihood in nats over the batch's labels [B, T], in FP32 from the logits on."""
    return summed_nats(model(input_ids=batch.input_ids, use_cache=False).logits, batch.labels)


def scheduled_lr(update: int, total_steps: int, options: OptimizerConfig) -> float:
    """The learning rate of the update with this index, counted from 0; a skipped step is no update."""
    schedule = options.schedule
    warmup = schedule.warmup_steps or 0
    if schedule.warmup_ratio is not None:
        warmup = warmup_steps_from_ratio(schedule.warmup_ratio, total_steps)
    return learning_rate(
        update,
        total_steps=total_steps,
        lr=options.lr,
        kind=schedule.kind,
        warmup_steps=warmup,
        final_ratio=schedule.final_ratio,
        decay_ratio=schedule.decay_ratio,
    )


def train_step(
    assembly: Assembly, batches: Sequence[Batch], *, lr: float, clip_norm: float | None
) -> StepResult:
    """Forward and backward over the micro-batches, then one update, or none if a number is not finite.

    Args:
        assembly: the built model with its optimiser.
        batches: the micro-batches of the step.
        lr: learning rate of this update.
        clip_norm: largest gradient norm; None does not clip.
    """
    try:
        loss, tokens = accumulate(assembly, batches)
        return update(assembly, loss, tokens, lr=lr, clip_norm=clip_norm)
    except BaseException:
        # what a step that raised has gathered so far belongs to no later one
        assembly.optimizer.zero_grad(set_to_none=True)
        assembly.router_bias.discard()
        raise


def accumulate(assembly: Assembly, batches: Sequence[Batch]) -> tuple[float, int]:
    """Gradients of the global mean loss, summed over micro-batches and ranks; returns that loss and its tokens."""
    counts = gather_rows(torch.tensor([batch.labels.numel() for batch in batches]))
    tokens = int(counts.sum())
    every = assembly.config.fsdp_config.reduce_every_micro_step
    losses = []
    held: dict[str, torch.Tensor] = {}  # replicated gradients, summed over ranks so far
    for index, batch in enumerate(batches):
        reduce = every or index == len(batches) - 1
        set_gradient_sync(assembly.model, reduce)
        # tokens are counted before the backward, so that any split over micro-batches and ranks, which sum
        # their gradients, gives the same gradient
        loss = token_nats(assembly.model, batch) / tokens
        loss.backward()
        losses.append(loss.detach().double())
        if reduce:
            _reduce_replicated(assembly, held)
    for fqn, parameter in assembly.replicated.items():
        parameter.grad = held.get(fqn)
    # the order of one process that runs the same micro-batches: micro-steps first, ranks within
    total = 0.0
    for value in gather_rows(torch.stack(losses)).t().flatten().tolist():
        total += value
    return total, tokens


def _reduce_replicated(assembly: Assembly, held: dict[str, torch.Tensor]) -> None:
    """Sums the new gradients of replicated weights over the ranks and adds them to those of earlier micro-steps."""
    sum_replicated(assembly.replicated.values())
    for fqn, parameter in assembly.replicated.items():
        if parameter.grad is not None:
            held[fqn] = held[fqn] + parameter.grad if fqn in held else parameter.grad
            parameter.grad = None


def update(assembly: Assembly, loss: float, tokens: int, *, lr: float, clip_norm: float | None) -> StepResult:
    """One update from the gradients that are there, or none if a number is not finite; the same on every rank."""
    optimizer = assembly.optimizer
    parameters = list(trainable(assembly.model))
    without = tuple(n for n, p in assembly.model.named_parameters() if p.requires_grad and p.grad is None)
    norm = gradient_norm(parameters)
    finite = bool(torch.isfinite(norm)) and math.isfinite(loss)
    if finite:
        if clip_norm is not None:
            clip_(parameters, norm, clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()  # a hook refreshes the quantised weights after it has succeeded
        assembly.router_bias.update(assembly.config.training.router_bias_update_rate)
    else:
        assembly.router_bias.discard()
    optimizer.zero_grad(set_to_none=True)
    return StepResult(loss, float(norm), lr, tokens, skipped=not finite, without_gradient=without)


def trainable(model: nn.Module) -> Iterable[nn.Parameter]:
    """The parameters that train, in the model's order, which is the order of the norm's sum."""
    return (p for p in model.parameters() if p.requires_grad)
