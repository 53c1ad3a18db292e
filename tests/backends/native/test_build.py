"""Compiled once, under a lock, for this CPU and compiler; without one the torch path runs and says so."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from quaver.backends import native
from quaver.backends.native import build

needs_compiler = pytest.mark.skipif(native.find_compiler() is None, reason="no C++ compiler")
SAY = """
import torch
from quaver.backends import native
print(native.status().path, native.status().reason, native.status().library, flush=True)
"""


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """An empty cache and an unset environment."""
    monkeypatch.setenv("QUAVER_CACHE", str(tmp_path))
    for name in (build.SWITCH, build.MARCH, "CXX"):
        monkeypatch.delenv(name, raising=False)
    native.forget()
    return tmp_path


def compiler_script(folder: Path, body: str) -> str:
    script = folder / "c++"
    script.write_text(f"#!/bin/sh\n{body}\n")
    script.chmod(0o755)
    return str(script)


def test_off_by_environment(fresh, monkeypatch, capsys):
    monkeypatch.setenv(build.SWITCH, "off")
    assert native.status().path == "torch"
    assert "QUAVER_KERNELS=off" in native.status().reason
    assert not native.usable(torch.zeros(1))
    assert capsys.readouterr().err == ""
    assert not any(fresh.iterdir())


def test_without_a_compiler_the_reason_is_said_and_nothing_is_warned(fresh, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(fresh))
    status = native.status()
    assert (status.path, status.compiler) == ("torch", None)
    assert "no C++ compiler" in status.reason
    assert capsys.readouterr().err == ""


def test_a_compilers_error_is_one_warning_with_its_message(fresh, monkeypatch, capsys):
    body = 'case "$1" in --version) echo 1.0;; *) echo "kernels.cpp:7: error: no such luck" >&2; exit 3;; esac'
    monkeypatch.setenv("CXX", compiler_script(fresh, body))
    status = native.status()
    assert status.path == "torch"
    assert "ended with code 3" in status.reason
    assert not native.usable(torch.zeros(1))
    native.status()
    said = capsys.readouterr().err
    assert said.count("the CPU kernels could not be built") == 1
    assert "no such luck" in said
    assert "QUAVER_KERNELS=off" in said
    assert not list(fresh.glob("kernels/*.part"))


def test_a_library_that_cannot_be_loaded_is_a_warning(fresh, monkeypatch, capsys):
    body = 'case "$1" in --version) echo 1.0;; *) for last; do :; done; echo rubbish > "$last";; esac'
    monkeypatch.setenv("CXX", compiler_script(fresh, body))
    assert native.status().path == "torch"
    assert "cannot be loaded" in capsys.readouterr().err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_cache_that_cannot_be_written_is_a_warning(fresh, monkeypatch, capsys):
    locked = fresh / "locked"
    locked.mkdir(mode=0o500)
    monkeypatch.setenv("QUAVER_CACHE", str(locked))
    assert native.status().path == "torch"
    assert "Permission denied" in capsys.readouterr().err


@needs_compiler
def test_a_library_that_others_may_write_is_not_loaded(fresh, capsys):
    library = Path(native.status().library)
    assert stat.S_IMODE(library.parent.stat().st_mode) == 0o700
    library.chmod(0o777)
    native.forget()
    assert native.status().path == "torch"
    assert "others may write" in capsys.readouterr().err


@needs_compiler
def test_the_name_depends_on_sources_compiler_flags_and_cpu(fresh, monkeypatch):
    compiler = native.find_compiler()
    names = [build._key(compiler)]
    assert build._key(compiler) == names[0]
    monkeypatch.setenv(build.MARCH, "x86-64-v2")
    names.append(build._key(compiler))
    monkeypatch.delenv(build.MARCH)
    body = 'echo "another 1.0"'
    names.append(build._key(compiler_script(fresh, body)))
    monkeypatch.setattr(build, "_cpu_features", lambda: "another CPU")
    names.append(build._key(compiler))
    monkeypatch.undo()
    changed = fresh / "sources"
    changed.mkdir()
    for path in build._files():
        (changed / path.name).write_bytes(path.read_bytes())
    (changed / "bits.h").write_text("// changed\n")
    monkeypatch.setattr(build, "SOURCES", changed)
    names.append(build._key(compiler))
    assert len(set(names)) == len(names)


@needs_compiler
def test_processes_that_start_together_compile_once(fresh):
    """The compiler here notes each call before it compiles; four processes share one empty cache."""
    calls = fresh / "calls"
    real = native.find_compiler()
    body = f'case "$1" in --version) :;; *) echo call >> {calls}; sleep 1;; esac\nexec {real} "$@"'
    env = {**os.environ, "CXX": compiler_script(fresh, body)}
    running = [
        subprocess.Popen([sys.executable, "-c", SAY], env=env, stdout=subprocess.PIPE, text=True) for _ in range(4)
    ]
    said = {process.communicate(timeout=300)[0] for process in running}
    assert len(said) == 1
    assert said.pop().startswith("native ")
    assert calls.read_text().split() == ["call"]
    assert len(list(fresh.glob("kernels/*.so"))) == 1


@needs_compiler
def test_a_damaged_library_is_made_again(fresh):
    library = Path(native.status().library)
    whole = library.read_bytes()
    native.forget()
    for damaged in (b"", whole[: len(whole) // 2]):
        library.unlink()
        library.write_bytes(damaged)
        library.chmod(0o700)
        done = subprocess.run([sys.executable, "-c", SAY], capture_output=True, text=True, check=True)
        assert done.stdout.startswith("native ")
        assert library.stat().st_size == len(whole)


@needs_compiler
def test_a_compiler_command_of_several_words(fresh, monkeypatch):
    real = native.find_compiler()
    monkeypatch.setenv("CXX", f"env {real}")
    status = native.status()
    assert status.path == "native"
    assert status.compiler.endswith(f"/env {real}")


@needs_compiler
def test_a_user_without_a_home_gets_the_torch_path(monkeypatch, capsys):
    monkeypatch.delenv("QUAVER_CACHE", raising=False)
    monkeypatch.delenv(build.SWITCH, raising=False)

    def nobody(self):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", nobody)
    native.forget()
    try:
        assert native.status().path == "torch"
        assert native.trial().path == "torch"
        assert "home directory" in capsys.readouterr().err
    finally:
        native.forget()


@needs_compiler
def test_a_trial_leaves_nothing_behind(fresh, monkeypatch):
    found = native.trial()
    assert (found.path, found.library) == ("native", None)
    assert not any(fresh.iterdir())
    library = native.status().library
    assert native.trial().library == library
    monkeypatch.setenv("CXX", compiler_script(fresh, "exit 1"))
    assert native.trial().path == "torch"


def test_the_flags_keep_ieee_arithmetic():
    assert "-ffp-contract=off" in build.flags()
    assert not any(flag in ("-ffast-math", "-Ofast", "-funsafe-math-optimizations") for flag in build.flags())


@needs_compiler
def test_what_a_kernel_takes(fresh):
    assert native.usable(torch.zeros(2), torch.nn.Parameter(torch.zeros(2)))
    assert not native.usable(torch.zeros(2, device="meta"))
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        assert not native.usable(torch.zeros(2))
