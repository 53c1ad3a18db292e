"""`export_hf`: a trained model as a folder that transformers, vLLM and SGLang load.

Every tensor that is handed in is written, or listed as dropped with its reason, or an error; every tensor that the
architecture has must be handed in. The folder appears under its name only when it is whole.
May import: models, this room's `files` and `hf_*`, errors.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from transformers import PreTrainedConfig

from quaver.checkpoint.files import cannot_start, flush_folder, reason_of, write_durably
from quaver.checkpoint.hf_convert import DTYPES, Conversion
from quaver.checkpoint.hf_describe import files_left_out, small_files, written_config
from quaver.checkpoint.hf_tokenizer import TokenizerDefinition
from quaver.checkpoint.hf_write import ShardWriter
from quaver.errors import CheckpointError, ConfigError
from quaver.models import build_on_meta

Experts = Literal["per_expert", "fused"]
MAX_SHARD_BYTES = 5_000_000_000


@dataclass(frozen=True)
class ExportReport:
    """What became of every tensor, and of the files beside them.

    Attributes:
        folder: the folder written.
        dtype: of the weights, `bfloat16` or `float32`.
        experts: `per_expert` or `fused`.
        weight_map: key -> file.
        kept_fp32: keys written as FP32 although `dtype` is smaller: transformers computes with them in FP32.
        dropped: FQN -> why it was not written.
        config_changes: field of config.json -> [the run's value, the written one].
        not_written: file -> why there is none.
        notes: what a user of the folder should know.
        files: file -> bytes.
    """

    folder: Path
    dtype: str
    experts: str
    weight_map: dict[str, str]
    kept_fp32: tuple[str, ...]
    dropped: dict[str, str]
    config_changes: dict[str, list[Any]]
    not_written: dict[str, str]
    notes: tuple[str, ...]
    files: dict[str, int]

    def as_json(self) -> dict[str, Any]:
        """JSON types only."""
        return {
            **self.__dict__,
            "folder": str(self.folder),
            "kept_fp32": list(self.kept_fp32),
            "notes": list(self.notes),
        }


def export_hf(
    named_tensors: Iterable[tuple[str, torch.Tensor]],
    hf_config: PreTrainedConfig,
    tokenizer: TokenizerDefinition | None,
    out: Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    experts: Experts = "per_expert",
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> ExportReport:
    """Writes a model folder: weights, config.json, generation_config.json, tokenizer.json, tokenizer_config.json.

    Memory stays at one shard and one tensor: `named_tensors` may be a generator that reads or gathers on demand.

    Args:
        named_tensors: (FQN, FP32 or BF16 tensor) of every parameter and persistent buffer, in any order.
        hf_config: the model's config.
        tokenizer: the run's tokeniser; None where there is none to write.
        out: the folder, which must not exist.
        dtype: torch.bfloat16 (rounded to nearest even) or torch.float32. What transformers keeps in FP32 (a
            router's weight and its `e_score_correction_bias`) is FP32 in either.
        experts: `per_expert`, as DeepSeek publishes, or `fused`, as transformers 5 builds.
        max_shard_bytes: of tensors in one file.

    Raises:
        ConfigError: `out` exists, or dtype, experts or max_shard_bytes are none of the above.
        CheckpointError: a missing, unknown, doubled or wrongly shaped tensor, one of another dtype or with values
            that are not finite; experts that cannot be taken apart; a tokeniser larger than the vocabulary; or
            the folder cannot be written. Nothing is left behind.
    """
    out = Path(out).expanduser().absolute()
    _check_arguments(out, dtype, experts, max_shard_bytes, hf_config)
    model = build_on_meta(hf_config, dtype, "eager")  # the one attention that every architecture has
    config, changes = written_config(hf_config, model, dtype, tokenizer)
    notes = _tokenizer_notes(tokenizer, hf_config.vocab_size)
    beside = out.with_name(f".{out.name}.part-{os.urandom(4).hex()}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        beside.mkdir()
        writer = ShardWriter(beside, max_shard_bytes)
        tensors = Conversion(model, config, experts)
        for key, tensor in tensors.converted(named_tensors):
            writer.add(key, tensor)
        weight_map = writer.finish()
        for name, content in small_files(config, model, tokenizer).items():
            write_durably(beside / name, content)
        sizes = writer.sizes()
        flush_folder(beside)
        _refuse_existing(out)
        beside.rename(out)
        flush_folder(out.parent)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"the model could not be written: {reason_of(error)}",
            where=str(getattr(error, "filename", None) or out),
            remedy="make room, or name a writable place",
        ) from error
    finally:
        if beside.exists():  # only where something failed, and that is what is to be told
            shutil.rmtree(beside, ignore_errors=True)
    return ExportReport(
        folder=out,
        dtype=str(dtype).removeprefix("torch."),
        experts=experts,
        weight_map=weight_map,
        kept_fp32=tuple(tensors.kept_fp32),
        dropped=tensors.dropped,
        config_changes=changes,
        not_written=files_left_out(model, tokenizer),
        notes=notes,
        files=sizes,
    )


def _check_arguments(
    out: Path, dtype: torch.dtype, experts: str, max_shard_bytes: int, hf_config: PreTrainedConfig
) -> None:
    _refuse_existing(out)
    if dtype not in DTYPES:
        raise ConfigError(f"not supported: export in {dtype}", where="dtype", remedy="bfloat16 or float32")
    if experts not in ("per_expert", "fused"):
        raise ConfigError(f"experts {experts!r} is unknown", where="experts", remedy="per_expert or fused")
    if max_shard_bytes < 1:
        raise ConfigError(f"shards of {max_shard_bytes} bytes hold nothing", where="max_shard_bytes")
    if getattr(hf_config, "tie_word_embeddings", False):
        raise ConfigError(
            "not supported: export of tied embeddings",
            where="model.config_overrides.tie_word_embeddings",
            remedy="untie them",
        )


def _refuse_existing(out: Path) -> None:
    if out.is_symlink() or out.exists():
        raise ConfigError(
            f"{out} exists already, and nothing is overwritten", where="--out", remedy="name another folder"
        )


def _tokenizer_notes(tokenizer: TokenizerDefinition | None, vocab_size: int) -> tuple[str, ...]:
    if tokenizer is None:
        return ()
    if tokenizer.vocab_size > vocab_size:
        raise cannot_start(
            f"the tokenizer has {tokenizer.vocab_size} ids, the model's vocabulary only {vocab_size}",
            where=f"tokenizer {tokenizer.name}",
            remedy="export with the tokenizer that the model was trained with",
        )
    if tokenizer.added_tokens:
        return (
            f"tokenizer.json puts {tokenizer.added_tokens} special token(s) around a text; in training there were "
            "none: encode with add_special_tokens=False",
        )
    return ()
