"""Compiles the kernels on first use, into a cache that ranks starting together share, and says what came of it.

The library's name is a hash of everything that its machine code depends on: sources, compiler and its version,
flags, CPU features. One process compiles under a file lock, loads the file once to see that it is good, and renames
it into place; the others find it. A compiler's error, or a cache that cannot be written, is one warning on stderr and
the pure-torch path, which computes the same bits. May import: cache, compiler, errors, and Python's own library.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from quaver.backends.native import cache
from quaver.backends.native.cache import BuildError
from quaver.backends.native.compiler import (
    COMPILERS,
    MARCH,
    compile_to,
    compiler_command,
    find_compiler,
    flags,
    target,
    telling_of_slowness,
    version,
)
from quaver.errors import ConfigError

__all__ = ["MARCH", "SWITCH", "KernelStatus", "build", "failed", "find_compiler", "flags", "switched_on", "trial"]

SOURCES = Path(__file__).parent
SWITCH = "QUAVER_KERNELS"
"""Environment variable: "off" or "0" runs the pure-torch path; "on", "1" or nothing the kernels."""


@dataclass(frozen=True)
class KernelStatus:
    """Which path the reference backend takes on CPU tensors, and why.

    Args:
        path: "native" or "torch".
        reason: one sentence.
        library: the compiled file, of the native path.
        compiler: path of the compiler, where one was found.
        flags: what it was called with.
        remedy: what to do where the kernels could not be built.
    """

    path: Literal["native", "torch"]
    reason: str
    library: str | None = None
    compiler: str | None = None
    flags: tuple[str, ...] = ()
    remedy: str | None = None

    def to_json(self) -> dict[str, Any]:
        """For environment.json and `quaver doctor --json`."""
        return asdict(self)


def switched_on() -> bool:
    """Whether the environment wants the kernels.

    Raises:
        ConfigError: the variable holds something else than on, 1, off or 0.
    """
    given = os.environ.get(SWITCH, "")
    if given.lower() in ("", "on", "1"):
        return True
    if given.lower() in ("off", "0"):
        return False
    raise ConfigError(
        f"{given!r} neither switches the CPU kernels on nor off",
        where=f"the environment variable {SWITCH}",
        remedy=f"set {SWITCH} to on, 1, off or 0, or unset it (on)",
    )


def trial() -> KernelStatus:
    """What `build` would come to, leaving nothing behind: a library not yet in the cache is compiled and removed.

    It is compiled, locked and loaded in a temporary folder where the cache is or would be made, so that what the
    system refuses there is refused here.

    Raises:
        ConfigError: as `build`.
    """
    compiler = find_compiler()
    if not switched_on() or compiler is None:
        return build()[1]
    try:
        folder = cache.cache_folder()
        if cache.is_good(_place(compiler, folder), _functions()):
            return build()[1]
        with cache.place_for_trial(folder) as place:
            library, status = build(place)
    except (BuildError, OSError) as error:
        return _failed(compiler, error)
    if library is None:
        return status
    reason = f"compiled for {target()} at first use (a trial has been made)"
    return replace(status, reason=reason, library=None)


def build(folder: Path | None = None) -> tuple[Path | None, KernelStatus]:
    """The compiled library, made now if it is not in the cache (or `folder`); None beside a status that says why.

    Raises:
        ConfigError: QUAVER_KERNELS says neither on nor off.
    """
    if not switched_on():
        return None, KernelStatus("torch", f"{SWITCH}=off")
    if sys.platform != "linux":
        return None, KernelStatus("torch", f"kernels are built on Linux only, this is {sys.platform}")
    compiler = find_compiler()
    try:
        if not compiler_command() or compiler is None:
            return None, KernelStatus("torch", f"no C++ compiler ({', '.join(COMPILERS)}, or $CXX) was found")
        with telling_of_slowness(compiler):
            library = _library(compiler, folder or cache.cache_folder())
    except (BuildError, OSError) as error:
        return None, _failed(compiler, error)
    return library, KernelStatus("native", f"compiled for {target()}", str(library), compiler, flags())


def failed(compiler: str | None, why: str, remedy: str | None = None) -> KernelStatus:
    """One warning on stderr, and the status of the pure-torch path.

    Args:
        compiler: its command, where one was found.
        why: one line.
        remedy: None: a working compiler.
    """
    remedy = remedy or "install a working g++ or clang++"
    print(
        f"quaver: the CPU kernels could not be built, so the slower pure-torch path runs (same numbers): {why}\n"
        f"quaver: {remedy}; or set {SWITCH}=off to run without and without this warning",
        file=sys.stderr,
    )
    return KernelStatus("torch", f"the kernels could not be built: {why}", None, compiler, remedy=remedy)


def _failed(compiler: str | None, error: BuildError | OSError) -> KernelStatus:
    return failed(compiler, str(error), error.remedy if isinstance(error, BuildError) else None)


def _place(compiler: str, folder: Path) -> Path:
    return folder / f"quaver-{_key(compiler)}.so"


def _library(compiler: str, folder: Path) -> Path:
    """The good library of the cache; one that is damaged, or cannot be loaded, is made anew, once."""
    cache.prepare(folder)
    library = _place(compiler, folder)
    if not cache.is_good(library, _functions()):
        with cache.locked(folder, library.stem):
            if not cache.is_good(library, _functions()):
                cache.remove(library)
                _compile(compiler, library)
    return library


def _key(compiler: str) -> str:
    digest = hashlib.sha256()
    for path in _files():
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    for part in (compiler, version(compiler), *flags(), _cpu_features()):
        digest.update(part.encode(errors="surrogateescape") + b"\0")
    return digest.hexdigest()[:24]


def _files() -> list[Path]:
    return sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")])


def _functions() -> list[str]:
    """Names of what the sources export."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in _files())
    return re.findall(r"^QUAVER_API \w+ (\w+)\(", text, re.MULTILINE)


def _cpu_features() -> str:
    """What `-march=native` looks at: a cache may be shared by machines of several kinds."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.is_file() else []
    wanted = ("model name", "flags", "Features", "cpu family", "model", "stepping", "CPU part", "isa")
    found = {line.partition(":")[0].strip(): line for line in reversed(lines)}
    return "\n".join([platform.machine(), *(found.get(name, "") for name in wanted)])


def _compile(compiler: str, library: Path) -> None:
    """Into the cache, once it has been loaded: a compiler that made nothing ends with 0 too."""
    part = cache.part_file(library)
    try:
        compile_to(compiler, [str(path) for path in _files() if path.suffix == ".cpp"], str(part))
        why_not = cache.why_not_loadable(part, _functions())
        if why_not is not None:
            raise BuildError(f"what {compiler} made cannot be loaded: {why_not}")
        cache.keep(part, library)
    finally:
        part.unlink(missing_ok=True)
