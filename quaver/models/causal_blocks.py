"""Causal attention in BF16 on the CPU as batched matrix products: blocks of queries against the keys they may see.

A CPU's fast BF16 unit is reached through large matrix products. One block of 128 queries against all of its keys is
such a product, a flash kernel's small tiles are not; half of the score matrix is never computed either way. Scores
and softmax are FP32; probabilities are rounded to BF16, as the second product takes them, and kept for backward,
which so needs no score twice. That costs H T^2 / 2 numbers a sequence and layer: `fits` says where it is worth it.
Results do not depend on the batch or the number of threads. May import: torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd.function import once_differentiable

BLOCK = 128  # queries
SCORES = 2**19  # FP32 scores that are in the caches at once: as many heads as that gives
KEPT = 2**23  # largest H T^2 / 2, the probabilities kept a sequence and layer: 16 MiB in BF16


def fits(query: torch.Tensor, key: torch.Tensor) -> bool:
    """Whether this attention is for heads like these: BF16 on the CPU, self-attention, not too long a sequence."""
    if query.dtype is not torch.bfloat16 or query.device.type != "cpu" or query.shape[:3] != key.shape[:3]:
        return False
    heads, T = query.shape[1:3]
    return T > 1 and heads * T * T // 2 <= KEPT


def causal_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
) -> torch.Tensor:
    """softmax(scaling Q K' where the key is not later) V.

    Args:
        query, key: BF16 [B, H, T, D].
        value: BF16 [B, H, T, V].
        scaling: of the scores.

    Returns:
        BF16 [B, H, T, V].
    """
    with torch.autocast("cpu", enabled=False):  # autocast would round the FP32 scores to BF16
        output: torch.Tensor = _CausalAttention.apply(query, key, value, scaling)
    return output


class _CausalAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_BHTD: torch.Tensor, k_BHTD: torch.Tensor, v_BHTV: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        q, k, v = (heads.flatten(0, 1) for heads in (q_BHTD, k_BHTD, v_BHTV))  # [B H, T, ...]
        output = torch.empty_like(v, memory_format=torch.contiguous_format)
        later = torch.full((BLOCK, BLOCK), -torch.inf).triu_(1)
        keeps, kept = any(ctx.needs_input_grad), []
        for heads in _heads(q):
            # the scores' product takes FP32, which holds BF16 exactly: BF16 would round the scores
            q_scaled, k_wide = q[heads].float().mul_(scaling), k[heads].float().transpose(1, 2)
            for start, end in _blocks(q):
                scores = torch.bmm(q_scaled[:, start:end], k_wide[:, :, :end])
                scores[:, :, start:] += later[: end - start, : end - start]
                p = torch.softmax(scores, -1).to(v.dtype)
                output[heads, start:end] = torch.bmm(p, v[heads, :end])
                if keeps:
                    kept.append(p)
        ctx.save_for_backward(q, k, v, *kept)
        ctx.scaling = scaling
        return output.unflatten(0, q_BHTD.shape[:2])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, *kept = ctx.saved_tensors
        grad = grads[0].flatten(0, 1)
        dq, dk, dv = (
            torch.empty_like(heads, memory_format=torch.contiguous_format) for heads in (q, k, v)
        )
        probabilities = iter(kept)
        for heads in _heads(q):
            g, q_h, k_h, v_h = grad[heads], q[heads], k[heads], v[heads]
            # K and V get a part from every later block: summed in FP32, rounded once
            dk_sum, dv_sum = (torch.zeros(t.shape, dtype=torch.float32) for t in (k_h, v_h))
            for start, end in _blocks(q):
                p, g_block = next(probabilities), g[:, start:end]
                dv_sum[:, :end] += torch.bmm(p.transpose(1, 2), g_block)
                dp = torch.bmm(g_block, v_h[:, :end].transpose(1, 2)).float()
                ds = torch.ops.aten._softmax_backward_data(dp, p.float(), -1, torch.float32)
                ds = ds.mul_(ctx.scaling).to(q.dtype)
                dq[heads, start:end] = torch.bmm(ds, k_h[:, :end])
                dk_sum[:, :end] += torch.bmm(ds.transpose(1, 2), q_h[:, start:end])
            dk[heads], dv[heads] = dk_sum, dv_sum
        shape = grads[0].shape[:2]
        return dq.unflatten(0, shape), dk.unflatten(0, shape), dv.unflatten(0, shape), None


def _heads(q: torch.Tensor) -> Iterator[slice]:
    """Slices of the heads of all sequences whose scores fit into the caches together."""
    count = max(1, SCORES // (BLOCK * q.shape[1]))
    return (slice(start, start + count) for start in range(0, len(q), count))


def _blocks(q: torch.Tensor) -> Iterator[tuple[int, int]]:
    """(first, last + 1) of each block of queries, which sees the keys before `last + 1`."""
    T = q.shape[1]
    return ((start, min(T, start + BLOCK)) for start in range(0, T, BLOCK))
