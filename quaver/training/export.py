"""From a run's newest checkpoint to a Hugging Face folder. May import: assembly, checkpoint, data, config, errors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from quaver.assembly import assemble
from quaver.checkpoint import TrainState, load, locate
from quaver.checkpoint.hf_export import ExportReport, export_hf
from quaver.checkpoint.hf_tokenizer import (
    TokenizerDefinition,
    byte_tokenizer_definition,
    library_tokenizer_definition,
)
from quaver.config import load_config
from quaver.data import ByteTokenizer, LibraryTokenizer, Tokenizer, load_tokenizer
from quaver.distributed import init_world, local_tensor, shard_mesh


def export_run(
    run: Path, out: Path, *, dtype: str, experts: Any, on_message: Callable[[str], None]
) -> ExportReport:
    """Writes `out` from the FP32 masters of the run's newest whole checkpoint.

    Args:
        run: folder of the run.
        out: folder to write, which must not exist.
        dtype: "bfloat16" or "float32".
        experts: "per_expert" or "fused".
        on_message: told what was skipped on the way.

    Raises:
        CheckpointError: exit code 2; no usable checkpoint. Others as `export_hf`.
    """
    found = locate(run)
    for path, reason in found.skipped:
        on_message(f"skipped {path.name}: {reason}")
    # masters are what is exported, so nothing needs to be quantised, sharded or recomputed on the way
    config = load_config(
        run / "config.yaml", ["low_precision={enabled: false}", "fsdp_config={}", "gradient_checkpointing={}"]
    )
    tokenizer = _tokenizer(run, config.data.tokenizer)
    init_world()
    assembly = assemble(config, shard_mesh(None), torch.device("cpu"))
    state = TrainState(
        model=assembly.model,
        optimizer=assembly.optimizer,
        progress={},
        recipe=None,
        config_digest="",
        tokenizer_digest=tokenizer.digest,
    )
    load(found.path, state, optimizer=False, rng=False, loader=False, verified=True)
    tensors = {name: local_tensor(t) for name, t in assembly.model.state_dict().items()}
    assembly.router_bias.close()
    return export_hf(
        tensors.items(),
        assembly.hf_config,
        _definition(tokenizer),
        out,
        dtype=getattr(torch, dtype),
        experts=experts,
    )


def _tokenizer(run: Path, chosen: str) -> Tokenizer:
    """The tokeniser that the run kept in its folder; its digest is held against the checkpoint's when that loads."""
    return ByteTokenizer() if chosen == ByteTokenizer.name else load_tokenizer(str(run / "tokenizer.json"))


def _definition(tokenizer: Any) -> TokenizerDefinition | None:
    if isinstance(tokenizer, ByteTokenizer):
        return byte_tokenizer_definition()
    if isinstance(tokenizer, LibraryTokenizer):
        return library_tokenizer_definition(
            tokenizer.definition, name=tokenizer.name, eos_token=tokenizer.eos_token
        )
    return None
