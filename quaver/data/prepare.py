"""`prepare_data`: from the config's data section to two memory-mapped token caches, made once.

Several processes (the ranks of a run, two runs) may call it at once: a lock lets one build while the others
wait. A cache is built in a temporary folder and renamed when it is whole, so a killed process leaves no half
of one. May import `quaver.errors`, `quaver.config` (types only) and the modules of this room.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers

from quaver.data.bpe import open_bpe, train_bpe
from quaver.data.build import Progress, ScannedSource, scan, train_documents, write_cache
from quaver.data.cache import VERSION, TokenCache, find_fault, open_caches, read_manifest, write_manifest
from quaver.data.interleave import counts_per_period
from quaver.data.loader import require_windows
from quaver.data.paths import user_path
from quaver.data.sources import Source, find_sources
from quaver.data.split import SALT
from quaver.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer, require_vocabulary
from quaver.errors import ConfigError

if TYPE_CHECKING:
    from quaver.config import DataConfig

_BPE_FILE = "tokenizer.json"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PreparedData:
    """A corpus ready to train on.

    Args:
        train, validation: the two splits' tokens.
        tokenizer: the one that made them.
        manifest: files with sha256, what is left out and why, tokeniser, split, counts; as in manifest.json.
        bytes_per_token_validation: UTF-8 bytes of the validation documents per token (ends of documents too).
    """

    train: TokenCache
    validation: TokenCache
    tokenizer: Tokenizer
    manifest: dict[str, Any]
    bytes_per_token_validation: float


def prepare_data(
    config: DataConfig, *, seed: int, vocab_size: int | None = None, progress: Progress | None = None
) -> PreparedData:
    """Reads, splits and tokenises the corpus, or opens the cache that holds just that.

    Args:
        config: the data section.
        seed: the run's; it has no part in what is prepared (runs that differ in their seed share tokeniser,
            split and validation windows), only the `Loader` uses it.
        vocab_size: the model's, if there is one to compare with.
        progress: called as progress(stage, done, total), with total None where it is not known.

    Raises:
        ConfigError: the sources, the tokeniser or the cache folder cannot be used, or hold too few tokens.
    """
    del seed
    progress = progress or _no_progress
    sources, fixed = _check(config, vocab_size)
    identity = _identity(config, sources, fixed)
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    root = cache_root(config)
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root / f"{key}.lock", progress):
            prepared = _open_or_build(config, root / key, identity, sources, fixed, progress)
    except OSError as error:
        raise ConfigError(
            f"the token cache cannot be written: {error.strerror or error}",
            where=f"data.cache_dir, {error.filename or root}",
            remedy="point data.cache_dir or the variable QUAVER_CACHE to a writable folder with room",
        ) from error
    require_windows(prepared.train, config.seq_len)
    require_windows(prepared.validation, config.seq_len)
    return prepared


def check_data(config: DataConfig, *, vocab_size: int | None = None) -> None:
    """Raises the ConfigErrors that can be found without reading a document, for a dry run.

    Those are paths, kinds and names of files, weights, and the tokeniser with its vocabulary.
    """
    _check(config, vocab_size)


def _check(config: DataConfig, vocab_size: int | None) -> tuple[tuple[Source, ...], Tokenizer | None]:
    sources = find_sources(config.sources)
    counts_per_period([source.weight for source in sources])
    return sources, _fixed_tokenizer(config, vocab_size)


def _no_progress(stage: str, done: int, total: int | None) -> None:
    pass


def cache_root(config: DataConfig) -> Path:
    """The folder that holds the token caches: `cache_dir`, else $QUAVER_CACHE, else ~/.cache/quaver."""
    given = config.cache_dir or os.environ.get("QUAVER_CACHE") or "~/.cache/quaver"
    return user_path(given, "data.cache_dir") / "data"


def _fixed_tokenizer(config: DataConfig, vocab_size: int | None) -> Tokenizer | None:
    """The tokeniser where it is known before the corpus is read; None for a BPE yet to be trained."""
    if config.tokenizer == "bpe":
        require_vocabulary(config.bpe_vocab_size, vocab_size, "bpe")
        return None
    tokenizer = ByteTokenizer() if config.tokenizer == "byte" else load_tokenizer(config.tokenizer)
    require_vocabulary(tokenizer.vocab_size, vocab_size, tokenizer.name)
    return tokenizer


def _identity(config: DataConfig, sources: tuple[Source, ...], fixed: Tokenizer | None) -> dict[str, Any]:
    """All settings that decide a cache's content besides the source files' own; JSON types only."""
    return {
        "version": VERSION,
        "tokenizers": tokenizers.__version__,
        "tokenizer": f"bpe {config.bpe_vocab_size}" if fixed is None else fixed.digest,
        "split": {"salt": SALT, "validation_fraction": config.validation_fraction},
        "sources": [[source.name, str(source.root)] for source in sources],
    }


@contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for another process to prepare the corpus", 0, None)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield  # closing the file frees the lock, also where this process dies


def _open_or_build(
    config: DataConfig,
    folder: Path,
    identity: dict[str, Any],
    sources: tuple[Source, ...],
    fixed: Tokenizer | None,
    progress: Progress,
) -> PreparedData:
    fault = find_fault(folder, identity, sources)
    if fault is not None:
        if fault.damaged:
            _log.warning("the token cache %s is damaged: %s; it is built again", folder, fault.reason)
        else:
            _log.info("building the token cache %s: %s", folder, fault.reason)
        _build(config, folder, identity, sources, fixed, progress)
    manifest = read_manifest(folder)
    tokenizer = fixed or open_bpe((folder / _BPE_FILE).read_text(encoding="utf-8"))
    train, validation = open_caches(folder, manifest, sources)
    totals = [source["bytes"]["validation"] for source in manifest["sources"]]
    return PreparedData(train, validation, tokenizer, manifest, sum(totals) / validation.n_tokens)


def _build(
    config: DataConfig,
    folder: Path,
    identity: dict[str, Any],
    sources: tuple[Source, ...],
    fixed: Tokenizer | None,
    progress: Progress,
) -> None:
    for left_behind in folder.parent.glob(f"{folder.name}.tmp-*"):  # by a killed process: the lock is ours
        shutil.rmtree(left_behind)
    temporary = Path(tempfile.mkdtemp(prefix=f"{folder.name}.tmp-", dir=folder.parent))
    try:
        scanned = scan(sources, config.validation_fraction, progress)
        tokenizer = fixed or _trained_bpe(config, scanned, temporary, progress)
        manifest = write_cache(temporary, scanned, tokenizer, identity, progress)
        write_manifest(temporary, manifest)
        if folder.exists():
            shutil.rmtree(folder)  # maps that other processes hold stay readable
        temporary.rename(folder)
    finally:
        if temporary.exists():
            shutil.rmtree(temporary)


def _trained_bpe(
    config: DataConfig, scanned: tuple[ScannedSource, ...], folder: Path, progress: Progress
) -> Tokenizer:
    progress("training the tokenizer", 0, None)
    definition = train_bpe(train_documents(scanned), config.bpe_vocab_size)
    (folder / _BPE_FILE).write_text(definition, encoding="utf-8")
    return open_bpe(definition)
