"""Batches from token caches: the training loader with its one global cursor, and the fixed validation
windows.

A sample is a window of seq_len + 1 tokens on a grid of seq_len, so every token of a stream but the first is a
label once an epoch. The cursor counts samples over all ranks, and sample g is a pure function of (corpus,
seed, g): a resumed run, or one on another number of ranks, reads on in the very same order.

Shapes: B micro-batch size, T sequence length. May import `quaver.errors`, numpy, torch and the room's
cache, interleave and shuffle.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from quaver.data.cache import TokenCache, TokenStream
from quaver.data.interleave import Interleave
from quaver.data.shuffle import epoch_keys, permute
from quaver.errors import ConfigError


@dataclass(frozen=True)
class Batch:
    """One micro-batch.

    Args:
        input_ids: int64 [B, T].
        labels: int64 [B, T]: labels[b, t] is the token that follows input_ids[b, t]; every position counts.
        n_bytes: UTF-8 bytes of text that the labels stand for, for bits per byte; None in training batches.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    n_bytes: int | None = None

    def to(self, device: torch.device) -> Batch:
        """The same batch on a device."""
        return replace(self, input_ids=self.input_ids.to(device), labels=self.labels.to(device))


class Loader:
    """An endless sequence of training micro-batches.

    Micro-step m of rank r takes samples cursor + r*B to cursor + (r+1)*B, and the cursor moves by
    world_size*B: two ranks with one micro-step read what one rank reads with two.

    Args:
        cache: the train split.
        seq_len: T.
        micro_batch_size: B.
        seed: decides the order; each epoch of each source has its own.
        rank, world_size: among the ranks that read different data.
        cursor: samples that all ranks together have taken.

    Raises:
        ConfigError: a source has too few tokens for one window, or the weights have no short period.
    """

    def __init__(
        self,
        cache: TokenCache,
        *,
        seq_len: int,
        micro_batch_size: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        cursor: int = 0,
    ) -> None:
        require_windows(cache, seq_len)
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not in a world of {world_size}")
        if micro_batch_size < 1 or cursor < 0:
            raise ValueError(f"micro_batch_size {micro_batch_size} and cursor {cursor} must be >= 1 and >= 0")
        self._cache = cache
        self._seq_len = seq_len
        self._micro_batch_size = micro_batch_size
        self._seed = seed
        self._rank = rank
        self._world_size = world_size
        self._cursor = cursor
        self._interleave = Interleave([stream.weight for stream in cache.streams])
        self._keys: dict[int, tuple[int, npt.NDArray[np.uint64]]] = {}
        order = [cache.digest, seq_len, seed, [(stream.name, stream.weight) for stream in cache.streams]]
        self._digest = hashlib.sha256(json.dumps(order).encode()).hexdigest()

    @property
    def cursor(self) -> int:
        """Samples that all ranks together have taken."""
        return self._cursor

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        return self.next()

    def next(self) -> Batch:
        """The next micro-batch of this rank; never ends."""
        first = self._cursor + self._rank * self._micro_batch_size
        sources, windows = self._locate(np.arange(first, first + self._micro_batch_size, dtype=np.int64))
        self._cursor += self._world_size * self._micro_batch_size
        streams = [self._cache.streams[source] for source in sources]
        return _read(streams, windows, self._seq_len)

    def _locate(self, samples: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The source and the window of each sample."""
        sources, numbers = self._interleave.place(samples)
        windows = np.empty_like(samples)
        for source in np.unique(sources):
            stream = self._cache.streams[source]
            per_epoch = stream.windows(self._seq_len)
            chosen = np.flatnonzero(sources == source)
            epochs, positions = np.divmod(numbers[chosen], per_epoch)
            for epoch in np.unique(epochs):
                now = epochs == epoch
                keys = self._epoch_keys(int(source), int(epoch))
                windows[chosen[now]] = permute(positions[now], per_epoch, keys)
        return sources, windows

    def _epoch_keys(self, source: int, epoch: int) -> npt.NDArray[np.uint64]:
        cached = self._keys.get(source)
        if cached is None or cached[0] != epoch:
            cached = (epoch, epoch_keys(self._seed, self._cache.streams[source].name, epoch))
            self._keys[source] = cached
        return cached[1]

    def state_dict(self) -> dict[str, Any]:
        """{"cursor": samples taken by all ranks, "digest": of what they came from}; equal on all ranks."""
        return {"cursor": self._cursor, "digest": self._digest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where `state` left off.

        Raises:
            ConfigError: the state belongs to another corpus, tokeniser, sequence length, seed or weights.
        """
        if state["digest"] != self._digest:
            raise ConfigError(
                "the data is not that of the saved run: a cursor into it would repeat and skip samples",
                where="data (sources, weights, tokenizer, validation_fraction, seq_len) and seed",
                remedy="bring back the saved run's data and settings, or start a new run",
            )
        self._cursor = int(state["cursor"])


def validation_batches(cache: TokenCache, *, seq_len: int, batch_size: int, count: int) -> Iterator[Batch]:
    """The validation windows, the same on each call and whatever the seed, with their bytes counted.

    `count` batches of windows that lie evenly over each source's documents, the sources taken by weight. A
    split with fewer windows gives each of them once, so there may be fewer batches and the last one may be
    smaller.

    Bits per byte are sum(nats over all labels) / ln 2 / sum(n_bytes).

    Raises:
        ConfigError: the split has too few tokens for one window.
    """
    require_windows(cache, seq_len)
    available = [stream.windows(seq_len) for stream in cache.streams]
    sources, _ = Interleave([stream.weight for stream in cache.streams]).place(np.arange(batch_size * count))
    wanted = np.bincount(sources, minlength=len(available))
    chosen: list[tuple[TokenStream, int]] = []
    for stream, have, want in zip(cache.streams, available, wanted, strict=True):
        take = min(have, int(want))
        chosen += [(stream, i * have // take) for i in range(take)]
    for start in range(0, len(chosen), batch_size):
        streams, windows = zip(*chosen[start : start + batch_size], strict=True)
        yield _read(list(streams), np.array(windows), seq_len)


def require_windows(cache: TokenCache, seq_len: int) -> None:
    """Raises ConfigError where a source cannot give a training window, or no source a validation window."""
    short = [stream for stream in cache.streams if stream.windows(seq_len) == 0]
    if short and (cache.split == "train" or len(short) == len(cache.streams)):
        stream = short[0]
        raise ConfigError(
            f"the {cache.split} split of source {stream.name!r} has {len(stream.tokens)} tokens, "
            f"too few for one sequence of {seq_len} + 1",
            where="data.sources, data.seq_len",
            remedy="give more text, a smaller data.seq_len, or another data.validation_fraction",
        )


def _read(streams: list[TokenStream], windows: npt.NDArray[np.int64], seq_len: int) -> Batch:
    tokens = np.empty((len(streams), seq_len + 1), dtype=np.int64)
    n_bytes: int | None = 0
    for row, (stream, window) in enumerate(zip(streams, windows.tolist(), strict=True)):
        start = window * seq_len
        tokens[row] = stream.tokens[start : start + seq_len + 1]
        if stream.byte_counts is None or n_bytes is None:
            n_bytes = None
        else:
            n_bytes += int(stream.byte_counts[start + 1 : start + seq_len + 1].sum(dtype=np.int64))
    both = torch.from_numpy(tokens)
    return Batch(both[:, :-1].contiguous(), both[:, 1:].contiguous(), n_bytes)
