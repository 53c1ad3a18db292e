"""Whole training steps of one model and one batch: ours in each format, stock transformers, and the bare GEMMs.

May import: assembly, training, distributed, policies, stock, floor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial

import torch

from quaver.assembly import Assembly, assemble
from quaver.bench.comparison import Comparison, Group, turns
from quaver.bench.floor import bare_gemms
from quaver.bench.operators import drawn
from quaver.bench.policies import LABELS, run_config
from quaver.bench.sizes import Sizes
from quaver.bench.stock import stock_step
from quaver.bench.timing import Contestant
from quaver.data import Batch
from quaver.distributed import init_world, leave_world, shard_mesh
from quaver.training import train_step

CLIP_NORM = 1.0
LR = 1e-4


@contextmanager
def world() -> Iterator[None]:
    """A process group of one, as a run on one process has it."""
    started = init_world("cpu")
    try:
        yield
    finally:
        if started:
            leave_world()


@contextmanager
def as_runs_are_set() -> Iterator[None]:
    """The global settings of a run, and back: peers are timed with torch's own."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(deterministic)
        torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]


def one_batch(sizes: Sizes) -> Batch:
    """Random tokens: what they are has no bearing on the time."""
    vocabulary = sizes.model["vocab_size"]
    drawn_tokens = drawn(sizes.batch, sizes.seq_len + 1, seed=4).mul(1e6).abs().long() % vocabulary
    return Batch(drawn_tokens[:, :-1].contiguous(), drawn_tokens[:, 1:].contiguous())


def built(fmt: str, sizes: Sizes) -> Assembly:
    """The model with its optimiser, as a run on one process builds it."""
    return assemble(run_config(fmt, sizes), shard_mesh(None, "cpu"), torch.device("cpu"))


def our_step(assembly: Assembly, batch: Batch) -> None:
    """One bare step: no loader, no metrics, no checkpoint."""
    with as_runs_are_set():
        train_step(assembly, [batch], lr=LR, clip_norm=CLIP_NORM)


@contextmanager
def step_contestants(sizes: Sizes, needed: frozenset[str]) -> Iterator[Mapping[str, Contestant]]:
    """Forward, backward, clipping, AdamW, and with low precision the refresh of every weight."""
    batch = one_batch(sizes)
    with ExitStack() as stack:
        stack.enter_context(world())
        contestants: dict[str, Contestant] = {}
        for fmt in ("bf16", "mxfp8", "hif8"):
            if fmt in needed:
                assembly = built(fmt, sizes)
                stack.callback(assembly.router_bias.close)
                contestants[fmt] = partial(our_step, assembly, batch)
        for name in ("stock", "autocast"):
            if name in needed:
                contestants[name] = stock_step(
                    sizes, batch, lr=LR, clip_norm=CLIP_NORM, autocast=name == "autocast"
                )
        if "gemms" in needed:
            contestants["gemms"] = bare_gemms(sizes)
        yield contestants


def step_group() -> Group:
    """Each format over BF16, over stock transformers, and over its own GEMMs."""
    rows = []
    for fmt in ("mxfp8", "hif8", "bf16"):
        held = fmt != "bf16"
        label = f"{LABELS[fmt]} training step"
        if held:
            rows.append(
                Comparison(f"step.{fmt}.over_bf16", fmt, "bf16", 1.05, f"{label} over our BF16 step")
            )
        stock = f"{label} over stock transformers with BF16 weights, same model and batch"
        rows.append(Comparison(f"step.{fmt}.over_stock", fmt, "stock", 0.60 if held else None, stock))
        autocast = f"{label} over stock transformers with FP32 weights under BF16 autocast"
        rows.append(Comparison(f"step.{fmt}.over_autocast", fmt, "autocast", None, autocast))
        gemms = f"{label} over its bare BF16 GEMMs"
        rows.append(Comparison(f"step.{fmt}.over_gemms", fmt, "gemms", 1.7 if held else None, gemms))
    return Group("step", tuple(rows), turns(step_contestants))
