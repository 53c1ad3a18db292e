"""The token cache: its content, when it is made again, and that nobody ever sees half of one."""

import fcntl
import hashlib
import json
import logging
import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from quaver.data import PreparedData, prepare_data
from quaver.data import prepare as prepare_module
from quaver.data.cache import FileStamp
from quaver.data.split import document_number
from quaver.errors import ConfigError


def prepare(settings: object) -> tuple[PreparedData, bool]:
    """The prepared data and whether they were built just now."""
    stages: list[str] = []
    prepared = prepare_data(settings, seed=1, progress=lambda stage, done, total: stages.append(stage))
    return prepared, "tokenising" in stages


def cache_folder(tmp_path: Path) -> Path:
    (folder,) = (path for path in (tmp_path / "cache" / "data").iterdir() if path.is_dir())
    return folder


def content(prepared: PreparedData) -> list[object]:
    """All that a run can see of it, copied out of the maps."""
    parts: list[object] = []
    for cache in (prepared.train, prepared.validation):
        parts.append((cache.digest, cache.vocab_size, cache.eos_id))
        for stream in cache.streams:
            counts = None if stream.byte_counts is None else stream.byte_counts.tolist()
            parts.append((stream.name, stream.tokens.tolist(), stream.offsets.tolist(), counts))
    return parts


def test_documents_stand_in_order_each_with_its_end_and_its_side(config: Callable, folder: Path) -> None:
    prepared, _ = prepare(config(folder, validation_fraction=0.3))
    texts = [path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.txt"))]
    assert len(texts) == 40
    for cache, side in ((prepared.train, False), (prepared.validation, True)):
        own = [text for text in texts if (document_number(text) / 2**64 < 0.3) == side]
        assert own
        expected = b"".join(text.encode() + b"\0" for text in own)  # no text here holds a NUL
        (stream,) = cache.streams
        assert stream.tokens.dtype == np.uint16
        assert stream.tokens.tolist() == [256 if byte == 0 else byte for byte in expected]
        assert stream.offsets.tolist() == [0, *np.cumsum([len(text.encode()) + 1 for text in own])]
        assert (stream.byte_counts is None) == (not side)
    assert prepared.validation.streams[0].byte_counts.tolist() == [
        int(token < 256) for token in prepared.validation.streams[0].tokens
    ]


def test_the_manifest_tells_what_is_inside(config: Callable, folder: Path) -> None:
    (folder / "empty.txt").touch()
    (folder / ".hidden").touch()
    prepared, _ = prepare(config(folder))
    manifest = prepared.manifest
    (source,) = manifest["sources"]
    assert [file["path"] for file in source["files"]] == sorted(
        path.relative_to(folder).as_posix() for path in folder.rglob("[0-9]*.txt")
    )
    for file in source["files"]:
        data = (folder / file["path"]).read_bytes()
        assert (file["size"], file["sha256"]) == (len(data), hashlib.sha256(data).hexdigest())
        assert file["documents"] == 1
    assert [(left["path"], left["reason"]) for left in source["left_out"]] == [
        (".hidden", "a hidden name"),
        ("empty.txt", "holds no text"),
    ]
    assert manifest["tokenizer"]["name"] == "byte"
    assert manifest["tokenizer"]["digest"] == prepared.tokenizer.digest
    assert manifest["identity"]["split"]["validation_fraction"] == 0.05
    for cache in (prepared.train, prepared.validation):
        assert source["documents"][cache.split] == len(cache.streams[0].offsets) - 1
        assert source["tokens"][cache.split] == cache.n_tokens == len(cache.streams[0].tokens)
    assert sum(source["documents"].values()) == 40
    json.dumps(manifest)


def test_a_file_name_need_not_be_utf8(config: Callable, folder: Path) -> None:
    name = os.fsdecode(b"caf\xe9.txt")
    (folder / name).write_text("text")
    prepared, built = prepare(config(folder))
    assert built
    assert name in [file["path"] for file in prepared.manifest["sources"][0]["files"]]
    assert not prepare(config(folder))[1]


def test_the_seed_changes_nothing_that_is_prepared(config: Callable, folder: Path) -> None:
    first = prepare_data(config(folder), seed=1)
    second = prepare_data(config(folder), seed=2)
    assert content(first) == content(second)


def test_tokens_are_wide_where_the_vocabulary_is(config: Callable, folder: Path, tmp_path: Path) -> None:
    wide = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"[UNK]": 1 << 16, "[EOS]": 0}, unk_token="[UNK]")
    )
    wide.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    wide.save(str(tmp_path / "tokenizer.json"))
    prepared, _ = prepare(config(folder, tokenizer=str(tmp_path / "tokenizer.json")))
    assert prepared.train.streams[0].tokens.dtype == np.uint32
    assert set(prepared.train.streams[0].tokens.tolist()) == {0, 1 << 16}


def rewrite(path: Path) -> None:
    """Other text of the same size, with the old times put back."""
    status = path.stat()
    data = path.read_bytes()
    path.write_bytes(data.replace(b"Document", b"document"))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert path.stat().st_size == status.st_size
    assert path.stat().st_mtime_ns == status.st_mtime_ns


def append(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"more")


CHANGES: dict[str, Callable[[Path], object]] = {
    "a file grew": lambda folder: append(folder / "part-0" / "00.txt"),
    "a file has other text of the same size and time": lambda folder: rewrite(folder / "part-0" / "00.txt"),
    "a file came": lambda folder: (folder / "part-0" / "new.txt").write_text("new"),
    "a file went": lambda folder: (folder / "part-0" / "00.txt").unlink(),
    "a file has another name": lambda folder: (folder / "part-0" / "00.txt").rename(folder / "zz.txt"),
    "an empty file has text": lambda folder: append(folder / "empty.txt"),
    "a hidden file came": lambda folder: (folder / ".new").touch(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_corpus_is_prepared_again(config: Callable, folder: Path, change: str) -> None:
    (folder / "empty.txt").touch()
    first, built = prepare(config(folder))
    assert built
    again, built = prepare(config(folder))
    assert not built
    assert content(first) == content(again)
    CHANGES[change](folder)
    changed, built = prepare(config(folder))
    assert built
    assert changed.manifest["sources"] != first.manifest["sources"]
    _, built = prepare(config(folder))
    assert not built


def test_other_settings_make_another_cache(config: Callable, folder: Path) -> None:
    variants = [
        config(folder),
        config(folder, validation_fraction=0.2),
        config(folder, tokenizer="bpe", bpe_vocab_size=300),
        config(folder, tokenizer="bpe", bpe_vocab_size=310),
        config((folder, 1.0, "other-name")),
    ]
    digests = [prepare(variant)[0].train.digest for variant in variants]
    assert len(set(digests)) == len(variants)
    assert not any(prepare(variant)[1] for variant in variants)
    assert not prepare(config((folder, 7.0, None), seq_len=32))[1]  # weights and lengths are the loader's


def test_touched_files_are_hashed_once_and_keep_the_cache(
    config: Callable, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(config(folder))
    for path in folder.rglob("*.txt"):
        os.utime(path)
    _, built = prepare(config(folder))
    assert not built
    monkeypatch.setattr(FileStamp, "of", None)  # any hashing would raise
    _, built = prepare(config(folder))
    assert not built


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 2)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (lambda folder: truncate(folder / "train-0.bin"), "train-0.bin has"),
    "flipped": (lambda folder: flip(folder / "train-0.bin"), "train-0.bin changed"),
    "no offsets": (
        lambda folder: (folder / "train-0.offsets.bin").unlink(),
        "train-0.offsets.bin is missing",
    ),
    "no bytes": (lambda folder: (folder / "validation-0.bytes.bin").unlink(), "is missing"),
    "other tokenizer": (lambda folder: flip(folder / "tokenizer.json"), "tokenizer.json changed"),
    "no manifest": (lambda folder: (folder / "manifest.json").unlink(), "manifest cannot be read"),
    "half a manifest": (lambda folder: truncate(folder / "manifest.json"), "manifest cannot be read"),
    "another manifest": (
        lambda folder: (folder / "manifest.json").write_text("[]"),
        "manifest cannot be read",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_cache_is_reported_and_made_again(
    config: Callable, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    settings = config(folder, tokenizer="bpe", bpe_vocab_size=300)
    before = content(prepare(settings)[0])
    break_it, message = DAMAGES[damage]
    break_it(cache_folder(tmp_path))
    with caplog.at_level(logging.WARNING, logger="quaver"):
        second, built = prepare(settings)
    assert built
    assert content(second) == before
    (record,) = caplog.records
    assert "is damaged" in record.getMessage()
    assert message in record.getMessage()


def test_a_build_that_fails_or_is_killed_leaves_nothing_behind(
    config: Callable, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def die(stage: str, done: int, total: int | None) -> None:
        if stage == "tokenising":
            raise Killed

    with pytest.raises(Killed):
        prepare_data(config(folder), seed=1, progress=die)
    root = tmp_path / "cache" / "data"
    (lock,) = root.iterdir()
    assert lock.suffix == ".lock"
    (root / f"{lock.stem}.tmp-dead").mkdir()  # as after a SIGKILL
    (root / f"{lock.stem}.tmp-dead" / "train-0.bin").write_bytes(b"half")
    assert prepare(config(folder))[1]
    assert sorted(path.name for path in root.iterdir()) == sorted([lock.stem, lock.name])


def _race(settings: object, barrier: object, results: object) -> None:
    built = []

    def slowly(stage: str, done: int, total: int | None) -> None:
        if stage == "tokenising":
            built.append(done)
            time.sleep(0.05)

    barrier.wait()
    prepared = prepare_data(settings, seed=1, progress=slowly)
    results.put(
        (bool(built), prepared.train.digest, int(prepared.train.streams[0].tokens.sum(dtype=np.int64)))
    )


@pytest.mark.parametrize("stale", [False, True])
def test_of_processes_that_start_together_one_builds_and_all_read_the_same(
    config: Callable, folder: Path, stale: bool
) -> None:
    settings = config(folder)
    if stale:
        prepare(settings)
        append(folder / "part-0" / "00.txt")
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(4), context.Queue()
    processes = [context.Process(target=_race, args=(settings, barrier, results)) for _ in range(4)]
    for process in processes:
        process.start()
    found = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(timeout=60)
        assert process.exitcode == 0
    assert sum(built for built, _, _ in found) == 1
    assert len({(digest, tokens) for _, digest, tokens in found}) == 1


def test_who_waits_is_told(config: Callable, folder: Path, tmp_path: Path) -> None:
    prepare(config(folder))
    (lock_path,) = (tmp_path / "cache" / "data").glob("*.lock")
    stages: list[str] = []
    with lock_path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting = threading.Thread(
            target=prepare_data,
            args=(config(folder),),
            kwargs={"seed": 1, "progress": lambda stage, done, total: stages.append(stage)},
        )
        waiting.start()
        waiting.join(timeout=0.3)
        assert waiting.is_alive()
    waiting.join(timeout=30)
    assert not waiting.is_alive()
    assert stages == ["waiting for another process to prepare the corpus"]


def test_open_maps_outlive_a_rebuild(config: Callable, folder: Path) -> None:
    first, _ = prepare(config(folder))
    before = first.train.streams[0].tokens.tolist()
    append(folder / "part-0" / "00.txt")
    assert prepare(config(folder))[1]
    assert first.train.streams[0].tokens.tolist() == before


def test_a_file_that_changes_while_it_is_read_is_an_error(config: Callable, folder: Path) -> None:
    def meddle(stage: str, done: int, total: int | None) -> None:
        if stage == "reading the corpus" and done == total:
            append(folder / "part-0" / "00.txt")

    with pytest.raises(ConfigError, match="changed while it was being read") as caught:
        prepare_data(config(folder), seed=1, progress=meddle)
    assert "00.txt" in str(caught.value)
    assert prepare(config(folder))[1]


def test_a_cache_folder_that_cannot_be_written(config: Callable, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cache cannot be written") as caught:
        prepare_data(config(folder, cache_dir=str(tmp_path / "file")), seed=1)
    assert "data.cache_dir" in str(caught.value)


def test_a_full_disk_is_a_clear_error(
    config: Callable, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(prepare_module, "write_cache", full)
    with pytest.raises(ConfigError, match="No space left on device"):
        prepare_data(config(folder), seed=1)
    assert [path.suffix for path in (tmp_path / "cache" / "data").iterdir()] == [".lock"]


def test_the_cache_lies_where_the_environment_says(
    config: Callable, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUAVER_CACHE", str(tmp_path / "elsewhere"))
    prepare(config(folder, cache_dir=None))
    assert list((tmp_path / "elsewhere" / "data").iterdir())
    monkeypatch.delenv("QUAVER_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    prepare(config(folder, cache_dir=None))
    assert list((tmp_path / "home" / ".cache" / "quaver" / "data").iterdir())


def test_several_sources_have_streams_of_their_own(config: Callable, folder: Path, tmp_path: Path) -> None:
    lines = tmp_path / "lines.jsonl"
    lines.write_text("\n".join(json.dumps(f"line number {i}") for i in range(50)))
    prepared, _ = prepare(config((folder, 2.0, None), (lines, 1.0, "lines"), validation_fraction=0.3))
    assert [(s.name, s.weight) for s in prepared.train.streams] == [("corpus", 2.0), ("lines", 1.0)]
    assert [source["name"] for source in prepared.manifest["sources"]] == ["corpus", "lines"]
    counts = [source["documents"] for source in prepared.manifest["sources"]]
    assert [sum(count.values()) for count in counts] == [40, 50]


@pytest.mark.parametrize("split", ["train", "validation"])
def test_too_few_tokens_name_the_split(config: Callable, tmp_path: Path, split: str) -> None:
    # Of two documents the one with the greater number trains: a long one is chosen for the other side.
    short = "short"
    long = next(
        text
        for text in ("x" * length for length in range(300, 400))
        if (document_number(text) > document_number(short)) == (split == "validation")
    )
    (tmp_path / "two.jsonl").write_text(json.dumps(long) + "\n" + json.dumps(short))
    with pytest.raises(ConfigError, match=f"the {split} split of source 'two' has 6 tokens"):
        prepare_data(config(tmp_path / "two.jsonl"), seed=1)
