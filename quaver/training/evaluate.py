"""Validation on fixed windows, and sample continuations; neither touches the global random state.

May import: data, step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from quaver.data import Batch, Tokenizer
from quaver.distributed import gather_rows
from quaver.training.step import token_nats


@dataclass(frozen=True)
class Validation:
    """Mean loss in nats per token, and in bits per byte of the text that the labels stand for."""

    loss: float
    bits_per_byte: float


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients, and back."""
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train()


def validate(model: nn.Module, batches: Iterable[Batch], *, rank: int = 0, ranks: int = 1) -> Validation:
    """Summed over all windows first, divided once; the ranks share the batches and sum in the batches' order."""
    held = list(batches)
    rounds = -(-len(held) // ranks)
    mine = torch.zeros(rounds, dtype=torch.float64)
    device = next(model.parameters()).device
    with evaluating(model):
        for turn in range(rounds):
            # a forward pass takes all ranks, so one without a batch left runs the last one again, uncounted
            batch = held[min(turn * ranks + rank, len(held) - 1)]
            mine[turn] = token_nats(model, batch.to(device)).double()
    nats = 0.0
    for value in gather_rows(mine).t().flatten().tolist()[: len(held)]:
        nats += value
    tokens = sum(batch.labels.numel() for batch in held)
    n_bytes = sum(batch.n_bytes or 0 for batch in held)
    return Validation(nats / tokens, nats / math.log(2) / n_bytes if n_bytes else math.nan)


def continuation(
    model: nn.Module,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    tokens: int,
    window: int,
    temperature: float = 0.7,
    seed: int = 0,
) -> str:
    """Samples `tokens` tokens after the prompt, deterministic in `seed`.

    Args:
        tokens: how many; an end-of-document token ends it sooner.
        window: longest context that is fed, in tokens.
        temperature: softmax temperature.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = tokenizer.encode(prompt) or [tokenizer.eos_id]
    start, device = len(ids), next(model.parameters()).device
    with evaluating(model):
        for _ in range(tokens):
            context = torch.tensor([ids[-window:]], device=device)
            logits = model(input_ids=context, use_cache=False).logits[0, -1].float().cpu()
            logits = logits[: tokenizer.vocab_size]  # the model's vocabulary may be rounded up
            if not bool(torch.isfinite(logits).all()):
                return tokenizer.decode(ids[start:]) + " [logits are not finite]"
            token = int(torch.multinomial(torch.softmax(logits / temperature, -1), 1, generator=generator))
            if token == tokenizer.eos_id:
                break
            ids.append(token)
    return tokenizer.decode(ids[start:])
