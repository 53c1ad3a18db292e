"""Cross-entropy over a large vocabulary in a small memory: the numbers of torch's own, a few rows at a time.

torch's cross-entropy of FP32 logits holds the whole [T, V] matrix in FP32 four times: upcast, log-probabilities,
and the gradient of each. Rows do not depend on one another, so here FP32 exists for as many rows as a cache
holds. Forward keeps the logits as they came and two numbers a row; backward finds the log-probabilities again
from those by two subtractions, without a second softmax. Loss and gradient are those of
`F.cross_entropy(logits.float(), labels, reduction="sum")`, bit for bit. May import: torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

CHUNK_ELEMENTS = 2**18  # FP32 logits that one thread has in its hands: 1 MiB, about a core's cache


def summed_nats(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Negative log likelihood in nats, summed over all labels, in FP32.

    Args:
        logits: BF16 or FP32 [..., V].
        labels: int64 [...], each in [0, V): every position counts.

    Returns:
        FP32 scalar; the gradient has the dtype of the logits, rounded once from FP32.

    Raises:
        RuntimeError: a label outside the vocabulary.
    """
    nats: torch.Tensor = _SummedNats.apply(logits.flatten(0, -2), labels.flatten())
    return nats


class _SummedNats(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TV: torch.Tensor, labels_T: torch.Tensor) -> torch.Tensor:
        T = len(labels_T)
        labels_T1 = labels_T.unsqueeze(1)
        peak_T1, log_sum_T1, chosen_T1 = logits_TV.new_empty(3, T, 1, dtype=torch.float32)
        for rows in _chunks(logits_TV):
            logits = logits_TV[rows].float()
            log_p = torch.log_softmax(logits, -1)
            chosen_T1[rows] = log_p.gather(1, labels_T1[rows])
            if ctx.needs_input_grad[0]:
                # log_p = (logits - peak) - log_sum, where logits are highest: (peak - peak) - log_sum
                peak_T1[rows] = logits.amax(-1, keepdim=True)
                log_sum_T1[rows] = -log_p.amax(-1, keepdim=True)
        ctx.save_for_backward(logits_TV, labels_T1, peak_T1, log_sum_T1)
        # a vocabulary of the one token that was chosen: torch sums over tokens in its own order
        return F.nll_loss(chosen_T1, torch.zeros_like(labels_T), reduction="sum")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        logits_TV, labels_T1, peak_T1, log_sum_T1 = ctx.saved_tensors
        grad_TV = torch.empty_like(logits_TV)
        toward = -grads[0]
        picked: torch.Tensor | None = None  # the gradient of the log-probabilities: zero but for the labels
        for rows in _chunks(logits_TV):
            log_p = logits_TV[rows].float().sub_(peak_T1[rows]).sub_(log_sum_T1[rows])
            if picked is None or len(picked) != len(log_p):
                picked = torch.zeros_like(log_p)
            at = labels_T1[rows]
            picked.scatter_(1, at, toward.expand_as(at))
            grad_TV[rows] = torch.ops.aten._log_softmax_backward_data(picked, log_p, 1, torch.float32)
            picked.scatter_(1, at, 0.0)
        return grad_TV, None


def _chunks(logits_TV: torch.Tensor) -> Iterator[slice]:
    """Slices of rows that fit into the caches together."""
    T, V = logits_TV.shape
    rows = max(1, torch.get_num_threads() * CHUNK_ELEMENTS // V)
    return (slice(start, start + rows) for start in range(0, T, rows))
