"""What can be known without training: the checks of a dry run, which are the first ones of every run.

May import: assembly, data, distributed, backends (the kernels' switch), config, errors.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from quaver.assembly import Assembly, plan_on_meta
from quaver.backends.native.build import switched_on
from quaver.checkpoint import look_for
from quaver.config import DataConfig, RunConfig
from quaver.data import check_data, prepare_data
from quaver.data.documents import read_documents
from quaver.data.prepare import cache_root
from quaver.data.sources import Source, find_sources
from quaver.distributed import check_shard_size, launched_world_size
from quaver.errors import CapabilityError, ConfigError
from quaver.low_precision import FormatExtension, low_precision_modules
from quaver.training.device import training_device
from quaver.training.memory import available_memory
from quaver.training.metrics import require_tensorboard
from quaver.training.run_folder import why_not_writable
from quaver.training.step import scheduled_lr

SMALL_CORPUS = 4 << 20  # bytes: a corpus up to this size is prepared by a dry run as the run would do it
READ_AT_MOST = 64 << 20  # bytes of the small files of a larger corpus that a dry run reads
MASTER, MOMENTS = 4, 8  # bytes a parameter: FP32, and two FP32 moments where it trains


def dry_run(
    config: RunConfig,
    ranks: int | None = None,
    local_ranks: int | None = None,
    formats: Sequence[FormatExtension] = (),
) -> Assembly:
    """Everything that can be known without training: names, spec, plan, shards, data sources and sizes.

    Args:
        config: the run's config.
        ranks: of the run; None: `fsdp_config.dp_shard_size`, else those that a launcher started.
        local_ranks: how many of them share this machine's memory; None leaves memory unchecked.
        formats: formats beside the built-in ones that the config may name.

    Raises:
        ConfigError, PlanError, CapabilityError: what the run itself would end with.
    """
    check_threads(config.training.num_threads)
    switched_on()  # raises for a value that is neither on nor off, before anything is made
    training_device(config, formats)
    check_start(config)
    assembly = plan_on_meta(config, formats)
    world = ranks if ranks is not None else (config.fsdp_config.dp_shard_size or launched_world_size())
    shards = check_shard_size(config.fsdp_config.dp_shard_size, world)
    assembly.verdicts(shards)
    if local_ranks is not None:
        check_memory(assembly, shards, local_ranks)
    check_sequence(config, assembly)
    check_data(config.data, vocab_size=assembly.hf_config.vocab_size)
    check_cache_folder(config.data)
    if config.training.tensorboard:
        require_tensorboard()
    for step in (0, config.training.steps - 1):
        scheduled_lr(step, config.training.steps, config.optimizer)
    return assembly


def check_start(config: RunConfig) -> None:
    """What can be told of `checkpoint.load_from` without reading tensors.

    Raises:
        ConfigError: `model.init_from` beside it. CheckpointError: exit code 2; nothing is there.
    """
    source = config.checkpoint.load_from
    if source is None:
        return
    if config.model is not None and config.model.init_from is not None:
        raise ConfigError(
            "both name where the weights come from",
            where="checkpoint.load_from and model.init_from",
            remedy="keep one of them: a run's masters, or a Hugging Face folder",
        )
    look_for(source)


def check_threads(wanted: int | None) -> None:
    """CapabilityError for more threads than this machine can start with any sense: 4 a core, 64 in any case."""
    cores = os.cpu_count() or 1
    most = max(64, 4 * cores)
    if wanted is not None and wanted > most:
        raise CapabilityError(
            f"{wanted} threads are too many for this machine's {cores} {'core' if cores == 1 else 'cores'}",
            where="training.num_threads",
            remedy=f"set it to at most {most}, or to null for torch's choice",
        )


def check_sequence(config: RunConfig, assembly: Assembly) -> None:
    """ConfigError if sequences are longer than the model's positions."""
    longest = getattr(assembly.hf_config, "max_position_embeddings", None)
    if longest is not None and config.data.seq_len > longest:
        raise ConfigError(
            f"sequences of {config.data.seq_len} tokens are longer than the model's {longest} positions",
            where="data.seq_len",
            remedy=f"set data.seq_len to at most {longest}, or raise "
            "model.config_overrides.max_position_embeddings",
        )


# Memory ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StateBytes:
    """Bytes that a run keeps of a whole model, over all ranks that share it: the least that it needs."""

    masters: int
    moments: int
    codes: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.masters + self.moments + self.codes


def state_bytes(model: nn.Module, codes: float | None) -> StateBytes:
    """FP32 masters, their moments and the codes of quantised weights; gradients and activations come on top.

    Args:
        model: with its replacements installed; the meta device is fine.
        codes: bytes an element of the quantised weights; None with low precision off.
    """
    parameters = list(model.parameters())
    elements = 0
    if codes is not None:
        held = (m._parameters[name] for _, m in low_precision_modules(model) for name in m.WEIGHTS)
        elements = sum({id(p): p.numel() for p in held if p is not None}.values())
    return StateBytes(
        masters=MASTER * sum(p.numel() for p in parameters),
        moments=MOMENTS * sum(p.numel() for p in parameters if p.requires_grad),
        codes=round(elements * codes) if codes is not None else 0,
    )


def check_memory(
    assembly: Assembly, shards: int, local_ranks: int, memory: Callable[[], int] = available_memory
) -> None:
    """CapabilityError where not even masters, moments and codes fit: before a folder is made or memory taken.

    Args:
        assembly: planned, on meta.
        shards: ranks that share one copy.
        local_ranks: ranks of this machine.
        memory: what may be used here, in bytes.
    """
    codes = assembly.policy.recipe.weight_class.BYTES if assembly.policy is not None else None
    need = state_bytes(assembly.model, codes)
    here, there_is = need.total * local_ranks // shards, memory()
    if here <= there_is:
        return
    share = local_ranks / shards
    parts = {"FP32 masters": need.masters, "moments": need.moments, "codes": need.codes}
    told = ", ".join(f"{name} {_gib(share * part)}" for name, part in parts.items() if part)
    ranks = "1 rank" if local_ranks == 1 else f"{local_ranks} ranks"
    each = "all" if shards == 1 else f"1/{shards}"
    raise CapabilityError(
        f"the model needs at least {_gib(here)} of memory on this machine, which has {_gib(there_is)} for it",
        where=f"{ranks} here, each with {each} of the weights: {told}",
        remedy="a smaller model, or more machines (torchrun); `quaver plan` needs no memory",
    )


def _gib(size: float) -> str:
    return f"{size / 2**30:,.1f} GiB"


# Data ------------------------------------------------------------------------------------------------------


def check_cache_folder(config: DataConfig) -> None:
    """ConfigError if the token cache cannot be made or written; nothing is left behind."""
    root = cache_root(config)
    reason = why_not_writable(root)
    if reason is not None:
        raise ConfigError(
            f"the token cache cannot be written: {reason}",
            where=f"data.cache_dir, {root}",
            remedy="point data.cache_dir or the variable QUAVER_CACHE to a writable folder with room",
        )


def check_documents(config: DataConfig, vocab_size: int | None) -> None:
    """The errors of a corpus's content, as far as a few megabytes tell them; leaves nothing behind.

    A corpus of up to SMALL_CORPUS bytes is prepared in a temporary folder, just as the run would do it. Of a larger
    one the small files are read, READ_AT_MOST bytes in all; the default corpus is left alone.

    Raises:
        ConfigError: what is no text, a source without any, too few documents or tokens.
    """
    sources = find_sources(config.sources)
    if sum(_size(source) for source in sources) <= SMALL_CORPUS:
        with tempfile.TemporaryDirectory(prefix="quaver-dry-run-") as folder:
            prepare_data(config.model_copy(update={"cache_dir": folder}), seed=0, vocab_size=vocab_size)
        return
    left = READ_AT_MOST
    for source in sources:
        if not source.lenient:
            left -= _read_small_files(source, left)


def _size(source: Source) -> int:
    return sum(file.path.stat().st_size for file in source.files)


def _read_small_files(source: Source, most: int) -> int:
    """Reads files until `most` bytes; returns how many were read."""
    read, complete, text = 0, True, False
    for file in source.files:
        size = file.path.stat().st_size
        if size > SMALL_CORPUS or read + size > most:
            complete = False
            continue
        read += size
        for document in read_documents(file):  # to its end: the last line may be the broken one
            text = text or bool(document)
    if complete and not text:
        raise ConfigError(
            "the source holds no text: every file is empty",
            where=f"{source.key}, {source.root}",
            remedy="put text there or name another path",
        )
    return read
