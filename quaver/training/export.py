"""From a run's newest checkpoint to a Hugging Face folder. May import: assembly, checkpoint, data, config, errors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quaver.assembly import assemble
from quaver.checkpoint import TrainState, is_checkpoint, load, locate, meaning_of
from quaver.checkpoint.hf_export import ExportReport, export_hf
from quaver.checkpoint.hf_tokenizer import (
    TokenizerDefinition,
    byte_tokenizer_definition,
    library_tokenizer_definition,
)
from quaver.config import load_config
from quaver.data import ByteTokenizer, LibraryTokenizer, Tokenizer, load_tokenizer
from quaver.distributed import init_world, local_tensor, shard_mesh
from quaver.errors import ConfigError


@dataclass(frozen=True)
class RunExport:
    """An export, and what it was made from.

    Args:
        report: what became of every tensor.
        checkpoint: the checkpoint that was read; step: its step.
        skipped: newer checkpoints that could not be used -> why.
    """

    report: ExportReport
    checkpoint: Path
    step: int
    skipped: dict[str, str]

    def as_json(self) -> dict[str, Any]:
        """JSON types only."""
        source = {"checkpoint": str(self.checkpoint), "step": self.step, "skipped": self.skipped}
        return {**source, **self.report.as_json()}


def export_run(
    run: Path, out: Path, *, dtype: str, experts: Any, on_message: Callable[[str], None]
) -> RunExport:
    """Writes `out` from the FP32 masters of the run's newest whole checkpoint, or of the one that is named.

    Args:
        run: folder of the run, or of one of its checkpoints.
        out: folder to write, which must not exist.
        dtype: "bfloat16" or "float32".
        experts: "per_expert" or "fused".
        on_message: told what was skipped on the way.

    Raises:
        ConfigError: not the folder of a run, or of a checkpoint in one. CheckpointError: exit code 2; no usable
        checkpoint, or one of another model than the run's config.yaml says. Others as `export_hf`.
    """
    chosen, run = run, run_of(run)
    found = locate(chosen)
    for path, reason in found.skipped:
        on_message(f"skipped {path.name}: {reason}")
    # masters are what is exported, so nothing needs to be quantised, sharded or recomputed on the way
    config = load_config(
        run / "config.yaml",
        [
            "low_precision={enabled: false}",
            "fsdp_config={}",
            "gradient_checkpointing={}",
            "model.init_from=null",
            "training.device=cpu",
        ],
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
        architecture=meaning_of(assembly.hf_config),
    )
    load(found.path, state, optimizer=False, rng=False, loader=False, verified=True)
    tensors = {name: local_tensor(t) for name, t in assembly.model.state_dict().items()}
    assembly.router_bias.close()
    report = export_hf(
        tensors.items(),
        assembly.hf_config,
        _definition(tokenizer),
        out,
        dtype=getattr(torch, dtype),
        experts=experts,
    )
    skipped = {path.name: reason for path, reason in found.skipped}
    return RunExport(report, found.path, found.manifest.step, skipped)


def run_of(path: Path) -> Path:
    """The run that a path means: itself, or the run that a checkpoint lies in; ConfigError where it is neither."""
    for folder in (path, path.absolute().parent, path.absolute().parent.parent):
        if (folder / "config.yaml").is_file() and (folder == path or is_checkpoint(path)):
            return folder
    raise ConfigError(
        f"{path} is not the folder of a run: it has no config.yaml",
        where="RUN",
        remedy="name a run's folder (runs/<name>), or one of its checkpoints (runs/<name>/checkpoints/step-...)",
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
