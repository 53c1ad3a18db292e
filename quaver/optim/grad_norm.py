"""The gradient norm in FP64, with the same bits at any world size, thread count or grouping.

A float sum depends on its order, so the order is written down here and made of elementwise additions alone,
which round the same everywhere (library reductions choose their order by shape and thread count):

1. the squares of one row (index of dim 0) are exact in FP64 and fold by halves, `x[:h] + x[h:2h]`, an odd
   last one joining the first; rows longer than 65536 elements fold piece by piece, then the pieces;
2. sharding on dim 0 keeps rows whole, so row sums are gathered in row order: each is the same bits on any
   rank;
3. the row sums of all parameters, in the order given, fold once more.

Imports torch and `errors` alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from quaver.errors import PlanError

PIECE = 65_536  # elements of one row that fold together: part of the defined order, never tuned
_BLOCK = 262_144  # elements squared at a time: 2 MiB of FP64, about an L2 cache; changes no bit
_NARROW = 32  # width at which rows stop folding block by block and go on together; changes no bit


def gradient_norm(parameters: Iterable[Tensor]) -> Tensor:
    """L2 norm of the gradients of `parameters` over all ranks, as a 0-d FP64 tensor on their device.

    Gradients may be plain tensors or DTensors whose mesh has at most one axis of Shard(0), the others
    Replicate. Parameters without a gradient contribute nothing. The order of `parameters` and their global
    shapes determine the bits; how rows are spread over ranks does not. Non-finite gradients give a non-finite
    norm: test it with `torch.isfinite` before clipping.

    Raises:
        PlanError: no gradient at all, or one with another placement (partial, or sharded on another dim).
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        raise PlanError(
            "no parameter has a gradient",
            where="gradient_norm",
            remedy="call it after backward and before zero_grad",
        )
    local = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
    sums = row_square_sums(local)
    return fold(torch.cat(_gather(gradients, sums)).unsqueeze(1))[0, 0].sqrt()


def clip_(parameters: Iterable[Tensor], norm: Tensor, max_norm: float) -> float:
    """Multiply gradients in place by min(1, max_norm / (norm + 1e-6)) and return that coefficient.

    The coefficient is computed in FP64 and rounded to FP32 once; each gradient element is one FP32 product,
    so the result does not depend on how parameters are grouped. A coefficient of 1 leaves the gradients
    untouched.

    Raises:
        PlanError: the norm is not finite (such a step must be skipped, not scaled), or max_norm is not
            positive.
    """
    value = float(norm.item())
    if not (value < float("inf")):
        raise PlanError(
            f"gradients of norm {value} cannot be clipped", where="clip_", remedy="skip the step instead"
        )
    if not max_norm > 0.0:
        raise PlanError(
            f"the clip norm {max_norm} is not positive",
            where="optimizer.clip_norm",
            remedy="give a positive norm, or null for no clipping",
        )
    coefficient = torch.tensor(min(1.0, max_norm / (value + 1e-6)), dtype=torch.float64).float().item()
    if coefficient < 1.0:
        gradients = [p.grad for p in parameters if p.grad is not None]
        local = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
        by_device: dict[torch.device, list[Tensor]] = defaultdict(list)
        for gradient in local:
            by_device[gradient.device].append(gradient)
        for group in by_device.values():
            torch._foreach_mul_(group, coefficient)
    return coefficient


def fold(x_KR: Tensor, *, until: int = 1) -> Tensor:
    """Sum over dim 0 in the fixed order of this module: [K, R] FP64 -> [min(K, until) or fewer, R], in place.

    Stopping early at `until` rows and going on later gives the same order, so the cheap last levels of many
    blocks can run together. No row at all sums to zero.
    """
    count = x_KR.shape[0]
    if count == 0:
        return x_KR.new_zeros(1, x_KR.shape[1])
    while count > until:
        half = count // 2
        x_KR[:half] += x_KR[half : 2 * half]
        if count % 2:
            x_KR[0] += x_KR[count - 1]
        count = half
    return x_KR[:count]


def row_square_sums(tensors: list[Tensor]) -> list[Tensor]:
    """Sum of squares of each row (index of dim 0) of plain tensors: [rows] FP64 each; a scalar is one row.

    Rows of equal width are squared side by side, whichever tensor they come from: few and large kernels, and
    the FP64 copy stays in cache instead of doubling the gradients' memory.
    """
    flat = [t.detach().reshape(t.shape[0] if t.ndim else 1, -1) if t.numel() else None for t in tensors]
    sums = [torch.zeros(t.shape[0] if t.ndim else 1, dtype=torch.float64, device=t.device) for t in tensors]
    groups: dict[tuple[int, torch.device], list[int]] = defaultdict(list)
    for index, rows in enumerate(flat):
        if rows is not None:
            groups[rows.shape[1], rows.device].append(index)
    for (width, _), indices in groups.items():
        members = [rows for i in indices if (rows := flat[i]) is not None]
        joined = _long_rows(members) if width > PIECE else _short_rows(members)
        for i, part in zip(indices, joined.split([rows.shape[0] for rows in members])):
            sums[i] = part
    return sums


def _short_rows(members: list[Tensor]) -> Tensor:
    """Row sums of tensors [R_i, K] of one K, concatenated; the last few levels of all rows fold at once."""
    width, total = members[0].shape[1], sum(rows.shape[0] for rows in members)
    block = min(max(1, _BLOCK // width), total)
    workspace = torch.empty(block, width, dtype=torch.float64, device=members[0].device)
    narrow = width
    while narrow > _NARROW:
        narrow //= 2
    folded = torch.empty(narrow, total, dtype=torch.float64, device=workspace.device)
    filled = done = 0
    for rows in members:
        start = 0
        while start < rows.shape[0]:
            count = min(block - filled, rows.shape[0] - start)
            workspace[filled : filled + count].copy_(rows[start : start + count])
            start, filled = start + count, filled + count
            if filled == block or done + filled == total:
                squares = workspace[:filled].square_()
                folded[:, done : done + filled] = fold(squares.T, until=_NARROW)
                done, filled = done + filled, 0
    return fold(folded)[0]


def _long_rows(members: list[Tensor]) -> Tensor:
    """Row sums of tensors [R_i, K] whose rows are longer than one piece, concatenated."""
    rows = [row for member in members for row in member]
    whole, rest = divmod(rows[0].shape[0], PIECE)
    pieces = _short_rows([row[: whole * PIECE].view(whole, PIECE) for row in rows]).view(-1, whole)
    if rest:
        last = _short_rows([row[whole * PIECE :].unsqueeze(0) for row in rows])
        pieces = torch.cat([pieces, last.unsqueeze(1)], dim=1)
    return fold(pieces.T)[0]


@dataclass(frozen=True)
class _Sharding:
    """Where a gradient's rows lie: the mesh axis that splits them, by its process group and size."""

    group: dist.ProcessGroup
    size: int


def _sharding(gradient: Tensor) -> _Sharding | None:
    """The axis that splits dim 0 over ranks, or None where every rank has all rows."""
    if not isinstance(gradient, DTensor):
        return None
    axes = []
    for axis, placement in enumerate(gradient.placements):
        # exact types: _StridedShard orders rows otherwise
        if type(placement) is Shard and placement.dim == 0:
            axes.append(axis)
        elif type(placement) is not Replicate:
            raise PlanError(
                f"a gradient has the placement {placement}; its norm is defined for Shard(0) and Replicate",
                where=f"gradient of shape {tuple(gradient.shape)}",
                remedy="shard parameters on dim 0, and reduce gradients before taking their norm",
            )
    if len(axes) > 1:
        raise PlanError(
            "a gradient's rows are sharded over more than one mesh axis",
            where=f"gradient of shape {tuple(gradient.shape)}, placements {gradient.placements}",
            remedy="shard dim 0 over one axis and replicate over the others",
        )
    if not axes or gradient.device_mesh.size(axes[0]) == 1:
        return None
    return _Sharding(gradient.device_mesh.get_group(axes[0]), gradient.device_mesh.size(axes[0]))


def _gather(gradients: list[Tensor], sums: list[Tensor]) -> list[Tensor]:
    """All row sums of each gradient in global row order, by one all-gather per mesh axis (none at size 1)."""
    gathered = list(sums)
    by_axis: dict[_Sharding, list[int]] = defaultdict(list)
    for index, gradient in enumerate(gradients):
        if (sharding := _sharding(gradient)) is not None:
            by_axis[sharding].append(index)
    for sharding, indices in by_axis.items():
        rows = [gradients[i].shape[0] for i in indices]
        # DTensor gives each rank ceil(rows / size) rows until none is left, so padding stands at the end only
        padded = [-(-count // sharding.size) for count in rows]
        send = sums[indices[0]].new_zeros(sum(padded))
        for i, part in zip(indices, send.split(padded)):
            part[: sums[i].shape[0]] = sums[i]
        receive = send.new_empty(sharding.size * send.shape[0])
        dist.all_gather_single(receive, send, group=sharding.group)
        by_rank = receive.view(sharding.size, -1).split(padded, dim=1)
        for i, count, part in zip(indices, rows, by_rank):
            gathered[i] = part.reshape(-1)[:count]
    return gathered
