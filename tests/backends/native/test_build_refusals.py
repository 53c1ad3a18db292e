"""What cannot be compiled, kept or loaded: found by the trial as by a run, and told with what to do about it.

Most tests compile one function instead of the kernels: what is shown here does not depend on what is compiled.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import os
import platform
import subprocess
import time
from pathlib import Path

import pytest

from quaver.backends import native
from quaver.backends.native import build, cache, compiler
from quaver.errors import ConfigError

needs_compiler = pytest.mark.skipif(native.find_compiler() is None, reason="no C++ compiler")
BASELINE = {"x86_64": "x86-64-v2", "aarch64": "armv8-a"}[platform.machine()]
API = '#define QUAVER_API extern "C" __attribute__((visibility("default")))\n'


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """An empty cache, an unset environment, and a source of one function: seven() is 7."""
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "one.cpp").write_text(API + "QUAVER_API int seven(int) { return 7; }\n")
    (sources / "two.cpp").write_text(API + "QUAVER_API int eight(int) { return 8; }\n")
    monkeypatch.setattr(build, "SOURCES", sources)
    monkeypatch.setenv("QUAVER_CACHE", str(tmp_path / "cache"))
    for name in (build.SWITCH, build.MARCH, "CXX", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "cache"


def script(folder: Path, body: str) -> str:
    """A compiler that tells its version at once, and does `body` when it is to compile."""
    path = folder.parent / "c++"
    path.write_text(f'#!/bin/sh\ncase "$1" in --version) echo 1.0; exit 0;; esac\n{body}\n')
    path.chmod(0o755)
    return str(path)


def refused(found: build.KernelStatus, said: str, *words: str, remedy: str) -> None:
    """One warning with the words and the remedy, both of them in the status too."""
    assert found.path == "torch"
    assert found.remedy is not None
    assert remedy in found.remedy
    for word in words:
        assert word in found.reason
        assert word in said
    assert said.count("could not be built") == 1
    assert remedy in said
    assert "install a working" not in said or remedy.startswith("install a working")


@needs_compiler
@pytest.mark.parametrize("place", ["file", "file/inside", "/proc/nope"])
def test_a_trial_refuses_a_cache_that_a_run_refuses(fresh, monkeypatch, tmp_path, capsys, place):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("QUAVER_CACHE", str(tmp_path / place))
    for made in (build.trial, lambda: build.build()[1]):
        refused(made(), capsys.readouterr().err, "cache", place, remedy="set QUAVER_CACHE to a folder")
    assert (tmp_path / "file").read_text() == "no folder"


@needs_compiler
@pytest.mark.parametrize("there", [False, True])
def test_a_trial_compiles_where_the_cache_will_be_and_leaves_nothing(fresh, monkeypatch, tmp_path, there):
    places = []
    real = cache.keep
    monkeypatch.setattr(cache, "keep", lambda part, library: (places.append(library), real(part, library)))
    if there:
        cache.prepare(cache.cache_folder())
    before = sorted(tmp_path.rglob("*"))
    assert build.trial().path == "native"
    assert sorted(tmp_path.rglob("*")) == before
    assert places[0].parents[1] == (fresh / "kernels" if there else tmp_path)


@needs_compiler
def test_a_trial_takes_the_lock_and_loads(fresh, monkeypatch, capsys):
    def no_locks(file, how):
        raise OSError(errno.ENOLCK, "No locks available")

    with monkeypatch.context() as without:
        without.setattr(fcntl, "flock", no_locks)
        refused(build.trial(), capsys.readouterr().err, "No locks available", remedy="QUAVER_CACHE")
    monkeypatch.setenv("CXX", script(fresh, "exit 0"))
    refused(build.trial(), capsys.readouterr().err, "cannot be loaded", "too short", remedy="install a working g++")
    assert not fresh.exists()


@needs_compiler
def test_a_cache_open_to_others_is_told_with_its_remedy(fresh, capsys):
    folder = cache.cache_folder()
    cache.prepare(folder)
    folder.chmod(0o777)
    for made in (build.trial, lambda: build.build()[1]):
        words = ("others may write", str(folder), "777")
        refused(made(), capsys.readouterr().err, *words, remedy=f"chmod go-w {folder}")
    assert list(folder.iterdir()) == []


@needs_compiler
def test_a_cache_of_another_user_is_told_with_its_remedy(fresh, monkeypatch, capsys):
    library, _ = build.build()
    assert library is not None
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    for made in (build.trial, lambda: build.build()[1]):
        words = ("belongs to another user", f"uid {owner}")
        refused(made(), capsys.readouterr().err, *words, remedy=f"chown {owner + 1} {library.parent}")


@pytest.mark.parametrize("given", ['g++ "', "/nonexistent", "no-such-ccache g++"])
def test_a_wrong_cxx_is_no_other_compiler(fresh, monkeypatch, capsys, given):
    monkeypatch.setenv("CXX", given)
    assert native.find_compiler() is None
    for made in (build.trial, lambda: build.build()[1]):
        refused(made(), capsys.readouterr().err, f"CXX={given!r}", remedy="unset CXX")
    assert not fresh.exists()


def test_a_cxx_of_spaces_is_none(fresh, monkeypatch):
    monkeypatch.setenv("CXX", "  ")
    found = native.find_compiler()
    monkeypatch.delenv("CXX")
    assert found == native.find_compiler()


@needs_compiler
def test_a_digest_that_is_no_text(fresh):
    library, _ = build.build()
    library.with_suffix(".sha256").write_bytes(b"\xff\xfe\x00")
    assert build.trial().path == "native"
    assert build.build()[1].path == "native"
    assert library.with_suffix(".sha256").read_bytes() == hashlib.sha256(library.read_bytes()).hexdigest().encode()


@needs_compiler
@pytest.mark.parametrize("bad", ["empty", "rubbish", "another"])
def test_a_bad_library_with_a_right_digest_is_made_again(fresh, tmp_path, bad):
    library, _ = build.build()
    whole = library.read_bytes()
    if bad == "another":
        (tmp_path / "other.cpp").write_text(API + "QUAVER_API int seven(int) { return -1; }\n")
        command = [native.find_compiler(), "-shared", "-fPIC", str(tmp_path / "other.cpp"), "-o", str(library)]
        subprocess.run(command, check=True)
        library.chmod(0o700)
    else:
        library.write_bytes(b"" if bad == "empty" else b"rubbish")
    library.with_suffix(".sha256").write_text(hashlib.sha256(library.read_bytes()).hexdigest())
    found, status = build.build()
    assert (found, status.path) == (library, "native")
    assert library.read_bytes() == whole
    assert ctypes.CDLL(str(library)).seven(0) == 7  # not the other one, still loaded under this name


@needs_compiler
def test_a_bad_library_goes_even_if_it_cannot_be_made_again(fresh, monkeypatch, tmp_path):
    real = native.find_compiler()
    monkeypatch.setenv("CXX", script(fresh, f'test -e {tmp_path}/broken && exit 1; exec {real} "$@"'))
    library, _ = build.build()
    (tmp_path / "broken").touch()
    library.write_bytes(b"rubbish")
    library.with_suffix(".sha256").write_text(hashlib.sha256(b"rubbish").hexdigest())
    assert build.build()[1].path == "torch"
    assert {path.suffix for path in library.parent.iterdir()} == {".lock"}


@needs_compiler
def test_a_compiler_that_makes_nothing_leaves_nothing_in_the_cache(fresh, monkeypatch, capsys):
    monkeypatch.setenv("CXX", script(fresh, "exit 0"))
    for _ in range(2):
        _, status = build.build()
        refused(status, capsys.readouterr().err, "cannot be loaded", remedy="install a working g++")
    assert {path.suffix for path in (fresh / "kernels").iterdir()} == {".lock"}


@needs_compiler
def test_a_wrong_instruction_set_is_named_once(fresh, monkeypatch, capsys):
    monkeypatch.setenv(build.MARCH, "no-such-cpu")
    _, status = build.build()
    said = capsys.readouterr().err
    refused(status, said, f"{build.MARCH}='no-such-cpu'", remedy=f"unset {build.MARCH}")
    assert said.count("error:") == 1  # of two sources
    assert len(said.splitlines()) == 2


@needs_compiler
def test_the_status_names_the_instruction_set(fresh, monkeypatch):
    assert build.build()[1].reason == "compiled for this CPU"
    monkeypatch.setenv(build.MARCH, BASELINE)
    assert f"{build.MARCH}={BASELINE}" in build.trial().reason
    assert build.build()[1].reason == f"compiled for {build.MARCH}={BASELINE}"
    assert f"-march={BASELINE}" in build.build()[1].flags


@pytest.mark.parametrize(("given", "on"), [("", 1), ("on", 1), ("1", 1), ("ON", 1), ("off", 0), ("0", 0), ("Off", 0)])
def test_what_the_switch_takes(fresh, monkeypatch, given, on):
    monkeypatch.setenv(build.SWITCH, given)
    assert build.switched_on() is bool(on)


@pytest.mark.parametrize("given", ["false", "no", "of", " off", "2"])
def test_any_other_switch_is_an_error(fresh, monkeypatch, given):
    monkeypatch.setenv(build.SWITCH, given)
    for use in (build.trial, build.build):
        with pytest.raises(ConfigError) as refusal:
            use()
        assert repr(given) in refusal.value.what
        assert build.SWITCH in refusal.value.where
        assert "off" in refusal.value.remedy
        assert refusal.value.exit_code == 2


@needs_compiler
@pytest.mark.parametrize(("rank", "lines"), [(None, 1), ("0", 1), ("1", 0)])
def test_a_slow_compiler_is_told_once(fresh, monkeypatch, capsys, rank, lines):
    monkeypatch.setattr(compiler, "PATIENCE", 0.1)
    if rank is not None:
        monkeypatch.setenv("LOCAL_RANK", rank)
    monkeypatch.setenv("CXX", script(fresh, f'sleep 0.6; exec {native.find_compiler()} "$@"'))
    assert build.build()[1].path == "native"
    assert capsys.readouterr().err.count("are being compiled") == lines
    assert build.build()[1].path == "native"  # from the cache
    assert capsys.readouterr().err == ""


def test_a_compiler_that_hangs_is_given_up_with_its_children(fresh, monkeypatch, capsys):
    """The shell's child holds the pipes: a shell that is ended alone would be waited for as long as the child."""
    monkeypatch.setattr(compiler, "TIMEOUT", 0.3)
    monkeypatch.setenv("CXX", script(fresh, "sleep 30; true"))
    began = time.monotonic()
    _, status = build.build()
    assert time.monotonic() - began < 15
    refused(status, capsys.readouterr().err, "did not end within", remedy="install a working g++")
