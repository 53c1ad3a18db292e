"""Compiles the kernels on first use, into a cache that ranks starting together share, and says what came of it.

The library's name is a hash of everything that its machine code depends on: sources, compiler and its version,
flags, CPU features. One process compiles under a file lock and renames the finished file into place; the others
find it. A compiler's error, or a cache that cannot be written, is one warning on stderr and the pure-torch path,
which computes the same bits. May import: errors, and Python's own library.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

SOURCES = Path(__file__).parent
SWITCH = "QUAVER_KERNELS"
"""Environment variable: "off" runs the pure-torch path."""

MARCH = "QUAVER_KERNEL_MARCH"
"""Environment variable: the instruction set to compile for, as `-march` takes it; "native" by default."""

# Never -ffast-math: the kernels equal the torch codecs bit for bit. Contraction would fuse a multiply and an add.
FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off", "-fno-trapping-math", "-fno-math-errno", "-fopenmp")
LINK = ("-shared", "-fPIC", "-fvisibility=hidden")
COMPILERS = ("g++", "c++", "clang++")
TIMEOUT = 300.0  # seconds for a compilation that takes about one


@dataclass(frozen=True)
class KernelStatus:
    """Which path the reference backend takes on CPU tensors, and why.

    Args:
        path: "native" or "torch".
        reason: one sentence.
        library: the compiled file, of the native path.
        compiler: path of the compiler, where one was found.
        flags: what it was called with.
    """

    path: Literal["native", "torch"]
    reason: str
    library: str | None = None
    compiler: str | None = None
    flags: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """For environment.json and `quaver doctor --json`."""
        return asdict(self)


class BuildError(Exception):
    """No library came of it; the message says why, in one line or the compiler's own many."""


def compiler_command() -> list[str]:
    """The C++ compiler: $CXX (which may hold more words, as "ccache g++"), else g++, c++ or clang++; [] if none."""
    for words in (shlex.split(os.environ.get("CXX", "")), *([name] for name in COMPILERS)):
        found = shutil.which(words[0]) if words else None
        if found is not None:
            return [found, *words[1:]]
    return []


# RuntimeError: a user without a home; SubprocessError: a compiler that does not tell its version
TROUBLE = (BuildError, OSError, RuntimeError, subprocess.SubprocessError)


def find_compiler() -> str | None:
    """The command of the C++ compiler in one line; None where there is none."""
    return shlex.join(compiler_command()) or None


def flags() -> tuple[str, ...]:
    """The compiler's flags, the instruction set included."""
    return (*FLAGS, f"-march={os.environ.get(MARCH) or 'native'}", *LINK)


def cache_folder() -> Path:
    """$QUAVER_CACHE/kernels, else ~/.cache/quaver/kernels."""
    return Path(os.environ.get("QUAVER_CACHE") or "~/.cache/quaver").expanduser().absolute() / "kernels"


def trial() -> KernelStatus:
    """What `build` would come to, leaving nothing behind: a library not yet in the cache is compiled and removed."""
    compiler = find_compiler()
    try:
        if compiler is not None and _whole(cache_folder() / f"quaver-{_key(compiler)}.so"):
            return build()[1]
    except TROUBLE as error:
        return failed(compiler, str(error))
    with tempfile.TemporaryDirectory(prefix="quaver-kernels-") as folder:
        library, status = build(Path(folder))
    if library is None:
        return status
    return replace(status, reason="compiled for this CPU at first use (a trial has been made)", library=None)


def build(folder: Path | None = None) -> tuple[Path | None, KernelStatus]:
    """The compiled library, made now if it is not in the cache (or `folder`); None beside a status that says why."""
    if os.environ.get(SWITCH, "").lower() in ("off", "0"):
        return None, KernelStatus("torch", f"{SWITCH}=off")
    if sys.platform != "linux":
        return None, KernelStatus("torch", f"kernels are built on Linux only, this is {sys.platform}")
    compiler = find_compiler()
    if compiler is None:
        return None, KernelStatus("torch", f"no C++ compiler ({', '.join(COMPILERS)}, or $CXX) was found")
    try:
        library = _library(compiler, folder or cache_folder())
    except TROUBLE as error:
        return None, failed(compiler, str(error))
    return library, KernelStatus("native", "compiled for this CPU", str(library), compiler, flags())


def failed(compiler: str | None, why: str) -> KernelStatus:
    """One warning on stderr, and the status of the pure-torch path."""
    print(
        f"quaver: the CPU kernels could not be built, so the slower pure-torch path runs (same numbers): {why}\n"
        f"quaver: install a working g++ or clang++, or set {SWITCH}=off to run without and without this warning",
        file=sys.stderr,
    )
    return KernelStatus("torch", f"the kernels could not be built: {why.splitlines()[0]}", None, compiler)


def _library(compiler: str, folder: Path) -> Path:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    library = folder / f"quaver-{_key(compiler)}.so"
    if not _whole(library):
        with (folder / f"{library.stem}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # ranks that start together wait here for the first
            if not _whole(library):
                _compile(compiler, library)
    _check_owner(library)
    return library


def _digest_file(library: Path) -> Path:
    return library.with_suffix(".sha256")


def _whole(library: Path) -> bool:
    """True if the library is there as it was compiled: the loader dies of one that was cut short."""
    kept = _digest_file(library)
    if not (library.is_file() and kept.is_file()):
        return False
    return kept.read_text(encoding="utf-8") == hashlib.sha256(library.read_bytes()).hexdigest()


def _key(compiler: str) -> str:
    digest = hashlib.sha256()
    for path in _files():
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    version = subprocess.run([*shlex.split(compiler), "--version"], capture_output=True, timeout=TIMEOUT, check=False)
    for part in (compiler, version.stdout.decode(errors="replace"), *flags(), _cpu_features()):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:24]


def _files() -> list[Path]:
    return sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")])


def _cpu_features() -> str:
    """What `-march=native` looks at: a cache may be shared by machines of several kinds."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.is_file() else []
    wanted = ("model name", "flags", "Features", "cpu family", "model", "stepping", "CPU part", "isa")
    found = {line.partition(":")[0].strip(): line for line in reversed(lines)}
    return "\n".join([platform.machine(), *(found.get(name, "") for name in wanted)])


def _compile(compiler: str, library: Path) -> None:
    sources = [str(path) for path in _files() if path.suffix == ".cpp"]
    handle, beside = tempfile.mkstemp(prefix=library.stem, suffix=".part", dir=library.parent)
    os.close(handle)
    try:
        done = subprocess.run(
            [*shlex.split(compiler), *flags(), *sources, "-o", beside],
            capture_output=True,
            timeout=TIMEOUT,
            check=False,
        )
        if done.returncode:
            said = done.stderr.decode(errors="replace").strip() or "it said nothing"
            raise BuildError(f"{compiler} ended with code {done.returncode}\n{said}")
        os.chmod(beside, 0o700)
        _digest_file(library).write_text(hashlib.sha256(Path(beside).read_bytes()).hexdigest(), encoding="utf-8")
        os.replace(beside, library)
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{compiler} did not end within {TIMEOUT:.0f} s") from error
    finally:
        Path(beside).unlink(missing_ok=True)


def _check_owner(library: Path) -> None:
    """A library is code: it must be this user's, and nobody else may have been able to write it."""
    for path in (library, library.parent):
        found = path.stat()
        if found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise BuildError(f"{path} belongs to another user, or others may write to it: it is not loaded")
