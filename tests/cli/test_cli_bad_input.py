"""Each bad input ends with exit 2 and one clear error on stderr; nothing is trained, made or overwritten."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]
Tiny = Callable[..., Path]


def refused(ended: Any, *words: str) -> None:
    """Exit 2, stdout empty, one error on stderr that holds all words, and no traceback."""
    assert ended.code == 2, ended.err
    assert ended.out == ""
    assert "Traceback" not in ended.err
    assert ended.err.count("error: ") == 1, ended.err
    for word in words:
        assert word in ended.err, (word, ended.err)


def files_below(folder: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"trainign": {"steps": 3}}, ("tiny.yaml:", "trainign", "unknown key", "did you mean training?")),
        ({"optimizer": {"learning_rate": 1.0}}, ("optimizer.learning_rate", "unknown key", "legal here: kind, lr")),
        ({"training.steps": "ten"}, ("training.steps", "wanted a whole number", "the text 'ten'")),
        ({"training.steps": True}, ("training.steps", "wanted a whole number", "true")),
        ({"data.seq_len": 0}, ("data.seq_len", "wanted a whole number >= 1", "0")),
        ({"low_precision.format": "fp4"}, ("low_precision.format", "fp4", "mxfp8_e4m3")),
        ({"data.seq_len": 65}, ("65 tokens", "64 positions", "data.seq_len")),
        ({"model.config_overrides.vocab_size": 64}, ("data.tokenizer", "260 ids", "only 64")),
        ({"model.config_overrides.hiden_size": 64}, ("hiden_size", "hidden_size")),
        ({"data.sources": [{"path": "/nowhere/corpus"}]}, ("data.sources[0]", "/nowhere/corpus")),
        ({"low_precision.backend": "npu"}, ("backend npu cannot run", "low_precision.backend")),
        ({"checkpoint": {"every": 0}}, ("checkpoint.every", "wanted a whole number >= 1")),
        ({"fsdp_config": {"dp_shard_size": 4}}, ("dp_shard_size 4", "ranks 1")),
        ({"name": "../elsewhere"}, ("name", "'../elsewhere' cannot name a folder")),
    ],
)  # fmt: skip
def test_bad_config(
    quaver: Run, tiny: Tiny, home: Path, tmp_path: Path, changes: dict[str, Any], words: tuple[str, ...]
) -> None:
    before = files_below(home)
    refused(quaver("train", tiny(**changes), "--out", home / "run"), *words)
    assert files_below(home) == before
    assert not (tmp_path / "cache").exists()


def test_duplicate_key_names_both_lines(quaver: Run, tiny: Tiny, home: Path) -> None:
    file = tiny()
    lines = file.read_text().splitlines()
    file.write_text("\n".join([*lines, "name: again"]) + "\n")
    first = next(number for number, line in enumerate(lines, 1) if line.startswith("name:"))
    refused(quaver("train", file), f"tiny.yaml:{len(lines) + 1}", "name", str(first))
    assert files_below(home) == {}


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("traning.steps=1", ("override 1", "traning", "did you mean training?")),
        ("training.steps", ("override 1", "'training.steps' is no override")),
        ("optimizer.lr=fast", ("override 1", "optimizer.lr", "wanted a number", "the text 'fast'")),
    ],
)
def test_bad_override(quaver: Run, tiny: Tiny, home: Path, override: str, words: tuple[str, ...]) -> None:
    refused(quaver("train", tiny(), override), *words)
    assert files_below(home) == {}


def test_missing_config_file(quaver: Run, home: Path) -> None:
    refused(quaver("train", "nowhere.yaml"), "nowhere.yaml", "no such file")
    refused(quaver("plan", "nowhere.yaml"), "nowhere.yaml", "no such file")


def test_empty_corpus(quaver: Run, tiny: Tiny, home: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    file = tiny(**{"data.sources": [{"path": str(tmp_path / "empty")}]})
    refused(quaver("train", file), "data.sources[0]", str(tmp_path / "empty"))
    (tmp_path / "empty" / "a.txt").write_text("")
    refused(quaver("train", file), "data.sources[0]")
    assert files_below(home) == {}


def test_corpus_that_is_not_utf8(quaver: Run, tiny: Tiny, home: Path, corpus: Path) -> None:
    (corpus / "05.txt").write_bytes(b"caf\xe9\n")
    refused(quaver("train", tiny()), "05.txt", "UTF-8")
    assert files_below(home) == {}


def test_existing_out_is_left_as_it_is(quaver: Run, tiny: Tiny, home: Path, tmp_path: Path) -> None:
    (home / "run").mkdir()
    (home / "run" / "precious.txt").write_text("mine")
    (home / "file").write_text("mine too")
    before = files_below(home)
    for taken in ("run", "file"):
        refused(quaver("train", tiny(), "--out", taken), f"{taken} exists already", "--out")
    assert files_below(home) == before
    assert not (tmp_path / "cache").exists()  # told before the corpus is prepared


def test_out_that_cannot_be_made(quaver: Run, tiny: Tiny, home: Path, tmp_path: Path) -> None:
    (home / "file").write_text("no folder")
    refused(quaver("train", tiny(), "--out", home / "file" / "run"), "cannot be made", "file is no folder")
    (home / "link").symlink_to(home / "gone")
    refused(quaver("train", tiny(), "--out", home / "link"), "exists already")
    assert sorted(path.name for path in home.iterdir()) == ["file", "link"]
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--name", "a", "--out", "b"), ("--name and --out",)),
        (("--name", "../evil"), ("error: --name: name: '../evil' cannot name a folder",)),
        (("--name", ""), ("name", "cannot name a folder")),
    ],
)
def test_flags(quaver: Run, tiny: Tiny, home: Path, flags: tuple[str, ...], words: tuple[str, ...]) -> None:
    refused(quaver("train", tiny(), *flags), *words)
    assert files_below(home) == {}


def test_tensorboard_that_is_not_installed(
    quaver: Run, tiny: Tiny, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    import importlib.util

    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "tensorboard" else real(name, *rest)
    )
    refused(quaver("train", tiny(**{"training.tensorboard": True})), "tensorboard", "pip install")
    assert files_below(home) == {}


@pytest.mark.parametrize(
    "arguments", [("train",), ("trian",), ("plan", "x.yaml", "--world-size", "0"), ("accept",)]
)
def test_usage_errors(quaver: Run, arguments: tuple[str, ...]) -> None:
    """Wrong usage exits with 2; verbs of later releases are unknown ones."""
    ended = quaver(*arguments)
    assert (ended.code, ended.out) == (2, "")
    assert "Traceback" not in ended.err
    assert "Usage: quaver" in ended.err


def test_all_problems_of_a_file_come_together(quaver: Run, tiny: Tiny) -> None:
    ended = quaver("train", tiny(**{"training.steps": 0, "optimizer": {"lr": "x"}, "sed": 1}))
    refused(ended, "3 errors", "training.steps", "optimizer.lr", "sed")


def test_the_process_exits_as_the_function_does(tiny: Tiny, home: Path) -> None:
    """`python -m quaver`, piped: exit 2, plain text without a single escape sequence."""
    ended = subprocess.run(
        [sys.executable, "-m", "quaver", "train", str(tiny(**{"training.steps": "\x1b[31mten"}))],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    refused(subprocess_ended(ended), "training.steps", r"\x1b[31mten")
    assert "\x1b" not in ended.stderr


def subprocess_ended(done: subprocess.CompletedProcess[str]) -> Any:
    from types import SimpleNamespace

    return SimpleNamespace(code=done.returncode, out=done.stdout, err=done.stderr)
