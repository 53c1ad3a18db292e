"""`train --dry-run` refuses what `train` would refuse, and leaves nothing behind."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quaver.config import load_config
from quaver.errors import CapabilityError
from quaver.low_precision import HiF8Tensor, MXFP8Tensor
from quaver.training import preflight

Run = Callable[..., Any]
Tiny = Callable[..., Path]


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary folders are made, to see that none is left."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def both_refuse(quaver: Run, home: Path, file: Path, *words: str, flags: tuple[str, ...] = ()) -> None:
    for extra in (("--dry-run",), ()):
        ended = quaver("train", file, *flags, *extra)
        assert (ended.code, ended.out) == (2, ""), ended.err
        for word in words:
            assert word in ended.err, (word, extra, ended.err)
    assert list(home.iterdir()) == []


def test_ranks(quaver: Run, tiny: Tiny, home: Path) -> None:
    """Without --nproc a dry run judges dp_shard_size ranks, and says how to start them; with it, those."""
    file = tiny(fsdp_config={"dp_shard_size": 2})
    shown = quaver("train", file, "--dry-run")
    assert shown.code == 0, shown.err
    assert "for 2 ranks: start with --nproc 2" in shown.out
    assert json.loads(quaver("train", file, "--dry-run", "--json").out)["start_with"] == "--nproc 2"
    assert json.loads(quaver("train", file, "--dry-run", "--json", "--nproc", "2").out)["start_with"] is None
    both_refuse(quaver, home, file, "dp_shard_size 2", "--nproc 2", flags=("--nproc", "1"))
    assert "--nproc" not in quaver("train", tiny(), "--dry-run").out


def test_cache_folder_that_cannot_be_made(
    quaver: Run, tiny: Tiny, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("QUAVER_CACHE", str(tmp_path / "file"))
    both_refuse(quaver, home, tiny(), "token cache cannot be written", "file is no folder", "data.cache_dir")


def test_a_file_system_that_takes_no_files(
    quaver: Run, tiny: Tiny, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its folder says that root may write; only trying tells."""
    monkeypatch.setenv("QUAVER_CACHE", "/proc/nope")
    both_refuse(quaver, home, tiny(), "token cache cannot be written", "/proc", "QUAVER_CACHE")


def test_a_switch_of_the_kernels_that_is_neither_on_nor_off(
    quaver: Run, tiny: Tiny, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUAVER_KERNELS", "false")
    both_refuse(quaver, home, tiny(), "'false'", "where: the environment variable QUAVER_KERNELS", "remedy: set")


def test_corpora(quaver: Run, tiny: Tiny, home: Path, corpus: Path, tmp_path: Path, scratch: Path) -> None:
    file = tiny()
    (corpus / "05.txt").write_bytes(b"caf\xe9\n")
    both_refuse(quaver, home, file, "05.txt", "not UTF-8")
    for path in corpus.iterdir():
        path.write_text("")
    both_refuse(quaver, home, file, "holds no text", "data.sources[0]")
    (corpus / "00.txt").write_text("one document alone, however long it may be")
    both_refuse(quaver, home, file, "document")
    (corpus / "00.txt").write_text("a")
    (corpus / "01.txt").write_text("b")
    both_refuse(quaver, home, file, "data.seq_len")  # too few tokens
    assert list(scratch.iterdir()) == []


def test_small_files_of_a_large_corpus(
    quaver: Run, tiny: Tiny, corpus: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a corpus above SMALL_CORPUS the small files are read, up to READ_AT_MOST bytes, and nothing is prepared."""
    monkeypatch.setattr(preflight, "SMALL_CORPUS", 100)
    (corpus / "big.txt").write_bytes(b"x" * 100 + b"\xe9")  # too large to be read here
    file = tiny()
    assert quaver("train", file, "--dry-run").code == 0
    (corpus / "11.txt").write_bytes(b"caf\xe9\n")
    ended = quaver("train", file, "--dry-run")
    assert ended.code == 2
    assert "11.txt" in ended.err
    monkeypatch.setattr(preflight, "READ_AT_MOST", 4)  # not even the five bytes of that file
    assert quaver("train", file, "--dry-run").code == 0
    assert list(scratch.iterdir()) == []


def test_an_empty_source_beside_a_large_one(
    quaver: Run, tiny: Tiny, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "SMALL_CORPUS", 100)
    (tmp_path / "empty.txt").write_text("")
    file = tiny(**{"data.sources": [{"path": str(corpus)}, {"path": str(tmp_path / "empty.txt")}]})
    ended = quaver("train", file, "--dry-run")
    assert ended.code == 2
    assert "holds no text" in ended.err
    assert "data.sources[1]" in ended.err


def test_threads(quaver: Run, tiny: Tiny, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both_refuse(quaver, home, tiny(**{"training.num_threads": 10**12}), "training.num_threads", "<= 1024")
    monkeypatch.setattr(preflight.os, "cpu_count", lambda: 20)
    both_refuse(quaver, home, tiny(**{"training.num_threads": 81}), "81 threads are too many", "at most 80")
    assert quaver("train", tiny(**{"training.num_threads": 80}), "--dry-run").code == 0


# Memory ----------------------------------------------------------------------------------------------------


def test_a_vocabulary_that_no_machine_holds(quaver: Run, tiny: Tiny, home: Path) -> None:
    file = tiny(**{"model.config_overrides.vocab_size": 99_999_999_999})
    both_refuse(quaver, home, file, "of memory on this machine", "FP32 masters", "moments")
    assert quaver("plan", file, "--json").code == 0


def test_state_bytes_by_hand(tiny: Tiny) -> None:
    """Two layers of four projections and one of experts, shapes written out; the embedding frozen."""
    file = tiny(**{"model.freeze": ["model.embed_tokens.*"]})
    assembly = preflight.plan_on_meta(load_config(file))
    total = sum(p.numel() for p in assembly.model.parameters())
    low = 2 * (64 * 32 + 48 * 32 + 64 * 32 + 32 * 32) + 4 * (64 * 32 + 32 * 32)
    found = preflight.state_bytes(assembly.model, MXFP8Tensor.BYTES)
    assert found == preflight.StateBytes(4 * total, 8 * (total - 288 * 32), low * 2 + low // 16)
    assert preflight.state_bytes(assembly.model, HiF8Tensor.BYTES).codes == low
    assert preflight.state_bytes(assembly.model, None).codes == 0


def test_memory_is_that_of_the_ranks_here(tiny: Tiny) -> None:
    assembly = preflight.plan_on_meta(load_config(tiny()))
    need = preflight.state_bytes(assembly.model, MXFP8Tensor.BYTES).total
    for shards, here, wanted in (
        (1, 1, need),
        (2, 2, need),
        (2, 1, need // 2),
        (1, 2, 2 * need),
        (4, 1, need // 4),
    ):
        preflight.check_memory(assembly, shards, here, lambda wanted=wanted: wanted)
        with pytest.raises(CapabilityError, match="needs at least"):
            preflight.check_memory(assembly, shards, here, lambda wanted=wanted: wanted - 1)


def test_the_16b_model_on_a_small_machine(quaver: Run, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """12 bytes of 16,585,005,056 parameters and 2.0625 of the 16,161,832,960 in eight bits: 216.4 GiB."""
    monkeypatch.setattr(preflight.check_memory, "__defaults__", (lambda: 64 << 30,))
    file = Path(__file__).parents[2] / "configs" / "dsv3-16b" / "mxfp8.yaml"
    both_refuse(
        quaver, home, file, "at least 216.4 GiB", "has 64.0 GiB", "FP32 masters 61.8 GiB", "moments 123.6 GiB",
        flags=("fsdp_config.dp_shard_size=null", "data.tokenizer=byte"),
    )  # fmt: skip
    assert quaver("plan", file, "fsdp_config.dp_shard_size=null").code == 0


def test_a_size_beyond_all_integers_is_told_in_few_lines(quaver: Run, tiny: Tiny, home: Path) -> None:
    """Not with the frames of C++ code that torch puts into its message."""
    ended = quaver("train", tiny(**{"model.config_overrides.vocab_size": 10**19}), "--dry-run")
    assert ended.code == 2
    assert len(ended.err.splitlines()) == 3, ended.err
    assert "model.config_overrides" in ended.err
