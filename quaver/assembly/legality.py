"""Whether each low-precision weight can be sharded over the ranks: aligned, exact, replicated or illegal.

Computed from shapes alone, so that `plan` answers for any number of ranks without hardware. Source: chapter 9
of the low-precision FSDP2 design; its 64-row rule is `strict_scale_tiles`. May import: config, low_precision.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from torch import nn

from quaver.config import FSDPConfig
from quaver.errors import PlanError
from quaver.low_precision import low_precision_modules

Verdict = Literal["aligned", "exact", "replicated", "illegal"]
BLOCK, STRICT_TILE = 32, 64


@dataclass(frozen=True)
class ShardVerdict:
    """How one weight goes over the ranks.

    Args:
        fqn: the parameter.
        shape: its logical shape; dim 0 (rows, or experts) is sharded.
        rows_per_rank: dim 0 per rank, rounded up.
        verdict: aligned (column blocks end at shard ends), exact (column scales of global blocks are shared),
            replicated, or illegal.
        reason: why it is not aligned.
    """

    fqn: str
    shape: tuple[int, ...]
    rows_per_rank: int
    verdict: Verdict
    reason: str = ""


def judge(fqn: str, shape: tuple[int, ...], ranks: int, config: FSDPConfig) -> ShardVerdict:
    """The verdict on one weight: [N, K] sharded by rows, [E, N, K] by whole experts."""
    rows = -(-shape[0] // ranks)
    refused: Verdict = "replicated" if config.fallback_to_unsharded else "illegal"
    what = "rows" if len(shape) == 2 else "experts"
    if shape[0] % ranks:
        return ShardVerdict(fqn, shape, rows, refused, f"{shape[0]} {what} do not divide by {ranks} ranks")
    tiled = rows if len(shape) == 2 else rows * shape[1]
    if config.strict_scale_tiles and tiled % STRICT_TILE:
        reason = f"{tiled} rows a rank are no multiple of {STRICT_TILE} (strict_scale_tiles)"
        return ShardVerdict(fqn, shape, rows, refused, reason)
    if len(shape) == 2 and rows % BLOCK and ranks > 1:
        return ShardVerdict(fqn, shape, rows, "exact", f"{rows} rows a rank cut a block of {BLOCK}")
    return ShardVerdict(fqn, shape, rows, "aligned")


def shard_verdicts(model: nn.Module, ranks: int, config: FSDPConfig) -> Iterator[ShardVerdict]:
    """Verdicts on every low-precision weight of a model with its replacements installed (meta is enough)."""
    for _, module in low_precision_modules(model):
        for name in module.WEIGHTS:
            yield judge(module.weight_fqn(name), tuple(module._parameters[name].shape), ranks, config)  # type: ignore[union-attr]


def require_legal(model: nn.Module, ranks: int, config: FSDPConfig) -> list[ShardVerdict]:
    """All verdicts on a model, or PlanError as `refuse_illegal` raises it."""
    verdicts = list(shard_verdicts(model, ranks, config))
    refuse_illegal(verdicts, ranks)
    return verdicts


def refuse_illegal(verdicts: Iterable[ShardVerdict], ranks: int) -> None:
    """PlanError naming the first illegal weight, its shape and the keys that decide, if there is one."""
    illegal = [v for v in verdicts if v.verdict == "illegal"]
    if illegal:
        first = illegal[0]
        what = "1 weight" if len(illegal) == 1 else f"{len(illegal)} weights"
        raise PlanError(
            f"{what} cannot be sharded over {ranks} ranks: {first.reason}",
            where=f"{first.fqn} {list(first.shape)}",
            remedy="another fsdp_config.dp_shard_size; or fsdp_config.fallback_to_unsharded: true keeps them "
            "whole on each rank (still eight-bit GEMMs)",
        )
