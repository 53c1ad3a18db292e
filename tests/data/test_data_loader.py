import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quaver.data import Batch, Loader, TokenCache, TokenStream, prepare_data, validation_batches
from quaver.errors import ConfigError

T = 4


def stream(n_windows: int, base: int, *, name: str = "s", weight: float = 1.0, extra: int = 0) -> TokenStream:
    """Tokens base, base + 1, ...: a window is known by its first token."""
    tokens = np.arange(base, base + n_windows * T + 1 + extra, dtype=np.uint16)
    return TokenStream(name, weight, tokens, np.array([0, len(tokens)]), None)


def cache(*streams: TokenStream, split: str = "train", digest: str = "d") -> TokenCache:
    return TokenCache(split, streams, digest, 1 << 16, 0)


TWO = cache(stream(7, 0, name="a", weight=3.0), stream(5, 1000, name="b", weight=1.0))


def loader(source: TokenCache = TWO, *, b: int = 2, seed: int = 1, **more: int) -> Loader:
    return Loader(source, seq_len=T, micro_batch_size=b, seed=seed, **more)


def starts(batch: Batch) -> list[int]:
    return batch.input_ids[:, 0].tolist()


def test_labels_are_the_next_tokens_and_windows_lie_on_the_grid() -> None:
    batch = loader(cache(stream(9, 0)), b=6).next()
    assert batch.input_ids.shape == batch.labels.shape == (6, T)
    assert batch.input_ids.dtype == batch.labels.dtype == torch.int64
    assert batch.input_ids.is_contiguous()
    assert batch.labels.is_contiguous()
    assert torch.equal(batch.labels, batch.input_ids + 1)
    assert all(start % T == 0 for start in starts(batch))
    assert batch.n_bytes is None


@pytest.mark.parametrize(("extra", "windows"), [(0, 3), (T - 1, 3), (T, 4)])
def test_a_window_needs_one_token_more_than_its_length(extra: int, windows: int) -> None:
    source = cache(stream(3, 0, extra=extra))
    assert source.streams[0].windows(T) == windows
    assert sorted(starts(loader(source, b=windows).next())) == [T * i for i in range(windows)]


def test_each_epoch_visits_each_window_once_in_its_own_order_also_inside_a_batch() -> None:
    reader = loader(cache(stream(7, 0)), b=3)
    order = [start for _ in range(14) for start in starts(reader.next())]  # 42 samples: 6 epochs of 7
    epochs = [order[i : i + 7] for i in range(0, 42, 7)]
    assert all(sorted(epoch) == [T * i for i in range(7)] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1


def test_sources_come_by_weight_each_with_its_own_epochs() -> None:
    reader = loader(b=4)
    batches = [starts(reader.next()) for _ in range(70)]
    assert all(sum(start >= 1000 for start in batch) == 1 for batch in batches)
    from_a = [start for batch in batches for start in batch if start < 1000]
    from_b = [start for batch in batches for start in batch if start >= 1000]
    assert all(sorted(from_a[i : i + 7]) == [T * k for k in range(7)] for i in range(0, 210, 7))
    assert all(sorted(from_b[i : i + 5]) == [1000 + T * k for k in range(5)] for i in range(0, 70, 5))


def test_the_seed_decides_the_order() -> None:
    def order(seed: int) -> list[int]:
        return starts(loader(cache(stream(50, 0)), b=50, seed=seed).next())

    assert order(1) == order(1)
    assert order(1) != order(2)


@given(
    steps=st.integers(0, 60), b=st.integers(1, 9), seed=st.integers(0, 2**40), world_size=st.integers(1, 3)
)
@settings(max_examples=60, deadline=None)
def test_resuming_at_any_cursor_equals_going_on(steps: int, b: int, seed: int, world_size: int) -> None:
    rank = seed % world_size
    going_on = loader(b=b, seed=seed, rank=rank, world_size=world_size)
    for _ in range(steps):
        going_on.next()
    state = going_on.state_dict()
    assert state["cursor"] == steps * b * world_size
    resumed = loader(b=b, seed=seed, rank=rank, world_size=world_size)
    resumed.load_state_dict(state)
    built_there = loader(b=b, seed=seed, rank=rank, world_size=world_size, cursor=state["cursor"])
    for _ in range(4):
        expected = starts(going_on.next())
        assert starts(resumed.next()) == expected
        assert starts(next(built_there)) == expected


@given(cursor=st.integers(0, 10**15), world_size=st.integers(1, 4), b=st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_ranks_side_by_side_read_what_one_rank_reads_in_turn(cursor: int, world_size: int, b: int) -> None:
    one = loader(b=b, cursor=cursor)
    many = [loader(b=b, cursor=cursor, rank=r, world_size=world_size) for r in range(world_size)]
    for _ in range(3):
        in_turn = [starts(one.next()) for _ in range(world_size)]
        assert [starts(reader.next()) for reader in many] == in_turn
    assert {reader.cursor for reader in many} == {one.cursor}


def test_a_state_of_other_data_or_another_order_is_refused() -> None:
    state = loader().state_dict()
    loader().load_state_dict(state)
    loader(b=5, rank=1, world_size=2).load_state_dict(state)  # ranks and micro-batches may change
    others = [
        loader(seed=2),
        loader(cache(*TWO.streams, digest="other")),
        loader(cache(TWO.streams[0])),
        Loader(TWO, seq_len=T + 1, micro_batch_size=2, seed=1),
    ]
    for other in others:
        with pytest.raises(ConfigError, match="not that of the saved run"):
            other.load_state_dict(state)
        assert other.cursor == 0


@pytest.mark.parametrize("changed", [{"rank": 1}, {"rank": -1}, {"cursor": -1}, {"b": 0}])
def test_impossible_arguments_are_refused(changed: dict[str, int]) -> None:
    with pytest.raises(ValueError):
        loader(**changed)


def test_too_few_tokens_for_one_sequence_is_an_error() -> None:
    short = TokenStream("short", 1.0, np.zeros(T, dtype=np.uint16), np.array([0, T]), None)
    with pytest.raises(ConfigError, match=rf"'short' has {T} tokens, too few for one sequence of {T} \+ 1"):
        loader(cache(stream(3, 0), short))
    with pytest.raises(ConfigError, match="validation split"):
        next(validation_batches(cache(short, split="validation"), seq_len=T, batch_size=1, count=1))


def validation_stream(n_windows: int, base: int, *, name: str = "s", weight: float = 1.0) -> TokenStream:
    plain = stream(n_windows, base, name=name, weight=weight)
    counts = np.arange(len(plain.tokens), dtype=np.uint32)  # token i stands for i bytes
    return TokenStream(name, weight, plain.tokens, plain.offsets, counts)


def validate(source: TokenCache, b: int, count: int) -> list[Batch]:
    return list(validation_batches(source, seq_len=T, batch_size=b, count=count))


def test_validation_windows_lie_evenly_and_are_the_same_each_time() -> None:
    source = cache(validation_stream(10, 0), split="validation")
    batches = validate(source, 2, 2)
    assert [starts(batch) for batch in batches] == [[0, 2 * T], [5 * T, 7 * T]]
    again = validate(source, 2, 2)
    assert all(torch.equal(a.labels, b.labels) for a, b in zip(batches, again, strict=True))
    # window w has the labels w*T + 1 ... w*T + T
    assert [batch.n_bytes for batch in batches] == [
        sum(w * T + i for w in pair for i in range(1, T + 1)) for pair in ([0, 2], [5, 7])
    ]


def test_asking_for_more_windows_than_there_are_gives_each_once() -> None:
    batches = validate(cache(validation_stream(5, 0), split="validation"), 2, 100)
    assert [starts(batch) for batch in batches] == [[0, T], [2 * T, 3 * T], [4 * T]]


def test_validation_takes_sources_by_weight_and_skips_one_without_a_window() -> None:
    source = cache(
        validation_stream(50, 0, weight=3.0), validation_stream(50, 1000, name="b"), split="validation"
    )
    chosen = [start for batch in validate(source, 4, 4) for start in batch.input_ids[:, 0].tolist()]
    assert sum(start >= 1000 for start in chosen) == 4
    empty = TokenStream("e", 1.0, np.zeros(1, np.uint16), np.array([0, 1]), np.zeros(1, np.uint32))
    source = cache(validation_stream(8, 0), empty, split="validation")
    assert [starts(batch) for batch in validate(source, 4, 2)] == [[0, 2 * T, 4 * T, 6 * T]]


def test_a_uniform_guess_over_the_bytes_costs_eight_bits_a_byte(config: Callable, folder: Path) -> None:
    prepared = prepare_data(config(folder, validation_fraction=0.3), seed=1)
    nats, n_bytes = 0.0, 0
    for batch in validation_batches(prepared.validation, seq_len=16, batch_size=4, count=50):
        assert batch.n_bytes == int((batch.labels < 256).sum())
        nats += int((batch.labels < 256).sum()) * math.log(256)
        n_bytes += batch.n_bytes or 0
    assert n_bytes > 100
    assert nats / math.log(2) / n_bytes == pytest.approx(8.0, abs=1e-12)
