"""The default corpus on this machine: the running Python's own library, whole."""

import hashlib
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from quaver.config import DataConfig
from quaver.data import Loader, PreparedData, prepare_data, validation_batches
from quaver.errors import ConfigError


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    return DataConfig(cache_dir=str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="module")
def prepared(settings: DataConfig) -> PreparedData:
    return prepare_data(settings, seed=1, vocab_size=260)


def test_it_is_the_library_without_packages_and_tests(prepared: PreparedData) -> None:
    (source,) = prepared.manifest["sources"]
    paths = [Path(file["path"]) for file in source["files"]]
    assert paths == sorted(paths, key=lambda path: path.as_posix())
    assert {Path("this.py"), Path("json/decoder.py"), Path("asyncio/events.py")} < set(paths)
    assert not {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"} & {
        part for path in paths for part in path.parts
    }
    assert all(path.suffix == ".py" for path in paths)
    root = Path(sysconfig.get_path("stdlib")).resolve()
    assert source["root"] == str(root)
    every_source = b"".join((root / path).read_bytes() for path in paths)
    every_source.decode("utf-8")
    assert sum(source["bytes"].values()) == len(every_source) > 5_000_000
    assert sum(source["documents"].values()) == len(paths)


def test_what_is_left_out_has_a_reason(prepared: PreparedData) -> None:
    (source,) = prepared.manifest["sources"]
    for left in source["left_out"]:
        data = (Path(source["root"]) / left["path"]).read_bytes()
        if left["reason"].startswith("not UTF-8"):
            with pytest.raises(UnicodeDecodeError):
                data.decode("utf-8")
        elif left["reason"] == "holds no text":
            assert data == b""
        else:
            assert left["reason"] in ("a link", "written by the build of this machine's Python")


def test_each_document_ends_where_its_end_stands(prepared: PreparedData) -> None:
    # Several batches of the tokeniser: offsets go on from one to the next.
    for cache in (prepared.train, prepared.validation):
        (stream,) = cache.streams
        assert (stream.offsets[1:] - 1).tolist() == np.flatnonzero(stream.tokens == 256).tolist()


def test_about_a_twentieth_validates(prepared: PreparedData) -> None:
    (source,) = prepared.manifest["sources"]
    share = source["documents"]["validation"] / sum(source["documents"].values())
    assert 0.02 < share < 0.09  # 0.05 of about 700 documents: standard deviation 0.008
    assert source["tokens"]["validation"] > 8 * 8 * 257


def test_another_process_reads_the_same_batches(settings: DataConfig, prepared: PreparedData) -> None:
    code = (
        "import sys, quaver.data as d, quaver.config as c, hashlib\n"
        "p = d.prepare_data(c.DataConfig(cache_dir=sys.argv[1]), seed=99)\n"
        "l = d.Loader(p.train, seq_len=256, micro_batch_size=8, seed=5)\n"
        "h = hashlib.sha256()\n"
        "[h.update(l.next().labels.numpy().tobytes()) for _ in range(20)]\n"
        "v = d.validation_batches(p.validation, seq_len=256, batch_size=8, count=8)\n"
        "[h.update(b.labels.numpy().tobytes()) for b in v]\n"
        "print(h.hexdigest())\n"
    )
    digest = hashlib.sha256()
    loader = Loader(prepared.train, seq_len=256, micro_batch_size=8, seed=5)
    for _ in range(20):
        digest.update(loader.next().labels.numpy().tobytes())
    batches = list(validation_batches(prepared.validation, seq_len=256, batch_size=8, count=8))
    assert [batch.labels.shape for batch in batches] == [(8, 256)] * 8
    for batch in batches:
        digest.update(batch.labels.numpy().tobytes())
    there = subprocess.run(
        [sys.executable, "-c", code, settings.cache_dir],
        env={**os.environ, "PYTHONHASHSEED": "3"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert there.stdout.strip() == digest.hexdigest()


def test_files_that_are_not_utf8_are_listed_and_left_out(
    config: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "lib"
    for name, data in {
        "good.py": b"print(1)\n" * 9,
        "pkg/also.py": "# café\n".encode() * 9,
        "old.py": b"# -*- coding: latin-1 -*-\n# caf\xe9\n",
        "pkg/empty.py": b"",
        "_sysconfigdata__linux.py": b"build_time_vars = {}\n",
        "test/test_x.py": b"x = 1\n",
        "pkg/tests/y.py": b"y = 1\n",
        "site-packages/z.py": b"z = 1\n",
        "notes.txt": b"no source\n",
    }.items():
        (library / name).parent.mkdir(parents=True, exist_ok=True)
        (library / name).write_bytes(data)
    (library / "link.py").symlink_to(library / "good.py")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: {"stdlib": str(library)}[name])
    (source,) = prepare_data(config(), seed=1).manifest["sources"]
    assert [file["path"] for file in source["files"]] == ["good.py", "pkg/also.py"]
    assert [(left["path"], left["reason"]) for left in source["left_out"]] == [
        ("_sysconfigdata__linux.py", "written by the build of this machine's Python"),
        ("link.py", "a link"),
        ("old.py", "not UTF-8 at byte offset 31"),
        ("pkg/empty.py", "holds no text"),
    ]
    (library / "old.py").write_bytes(b"# now UTF-8\n")
    (source,) = prepare_data(config(), seed=1).manifest["sources"]
    assert "old.py" in [file["path"] for file in source["files"]]


def test_a_python_without_sources_is_a_clear_error(
    config: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: {"stdlib": str(tmp_path)}[name])
    with pytest.raises(ConfigError, match="no standard library sources"):
        prepare_data(config(), seed=1)
