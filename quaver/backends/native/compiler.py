"""The C++ compiler: which one, with which flags, and one call of it that ends, says that it is slow, and why it failed.

May import: cache (for its error), and Python's own library.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from quaver.backends.native.cache import BuildError

MARCH = "QUAVER_KERNEL_MARCH"
"""Environment variable: the instruction set to compile for, as `-march` takes it; "native" by default."""

# Never -ffast-math: the kernels equal the torch codecs bit for bit. Contraction would fuse a multiply and an add.
FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off", "-fno-trapping-math", "-fno-math-errno", "-fopenmp")
LINK = ("-shared", "-fPIC", "-fvisibility=hidden")
COMPILERS = ("g++", "c++", "clang++")
TIMEOUT = 300.0  # seconds for a compilation that takes a few
PATIENCE = 5.0  # seconds after which one is told what is waited for


def compiler_command() -> list[str]:
    """The C++ compiler: $CXX (which may hold more words, as "ccache g++"), else g++, c++ or clang++; [] if none.

    Raises:
        BuildError: CXX names none that exists. Another one in its place would not be what was asked for.
    """
    given = os.environ.get("CXX", "")
    remedy = "unset CXX, or set it to a compiler that exists"
    try:
        words = shlex.split(given)
    except ValueError as error:
        raise BuildError(f"CXX={given!r} cannot be read as a command: {error}", remedy) from error
    if words:
        found = shutil.which(words[0])
        if found is None:
            raise BuildError(f"CXX={given!r}: there is no program {words[0]!r}", remedy)
        return [found, *words[1:]]
    return next(([found] for found in map(shutil.which, COMPILERS) if found is not None), [])


def find_compiler() -> str | None:
    """The command of the C++ compiler in one line; None where there is none, or CXX names none."""
    try:
        return shlex.join(compiler_command()) or None
    except BuildError:
        return None


def march() -> str:
    """$QUAVER_KERNEL_MARCH, else "native"."""
    return os.environ.get(MARCH) or "native"


def target() -> str:
    """What is compiled for, in words."""
    return "this CPU" if march() == "native" else f"{MARCH}={march()}"


def flags() -> tuple[str, ...]:
    """The compiler's flags, the instruction set included."""
    return (*FLAGS, f"-march={march()}", *LINK)


def run(command: list[str]) -> subprocess.CompletedProcess[bytes]:
    """The command's output; whatever it ended with.

    Raises:
        BuildError: it cannot be started, or did not end within TIMEOUT.
    """
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # so that a driver's own children end with it
        )
    except OSError as error:
        raise BuildError(f"{command[0]} cannot be started: {error.strerror or error}") from error
    with process:
        try:
            out, err = process.communicate(timeout=TIMEOUT)
        except BaseException as error:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                raise BuildError(f"{command[0]} did not end within {TIMEOUT:.0f} s") from error
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def version(compiler: str) -> str:
    """What the compiler says of itself.

    Raises:
        BuildError: as `run`.
    """
    return run([*shlex.split(compiler), "--version"]).stdout.decode(errors="replace")


def compile_to(compiler: str, sources: list[str], out: str) -> None:
    """Makes a shared library of the sources.

    Raises:
        BuildError: with the first error that the compiler told: the same one comes once a source.
    """
    done = run([*shlex.split(compiler), *flags(), *sources, "-o", out])
    if not done.returncode:
        return
    lines = [line.strip() for line in done.stderr.decode(errors="replace").splitlines() if line.strip()]
    said = next((line for line in lines if "error:" in line), lines[0] if lines else "it said nothing")
    ended = f"{compiler} ended with code {done.returncode}"
    if march() != "native" and march() in said:
        remedy = f"unset {MARCH}, or set it to an instruction set that the compiler knows"
        raise BuildError(f"{MARCH}={march()!r}: {ended}: {said}", remedy)
    raise BuildError(f"{ended}: {said}")


@contextmanager
def telling_of_slowness(compiler: str) -> Iterator[None]:
    """One line on stderr if what is done meanwhile takes longer than PATIENCE; of several ranks one tells it."""

    def tell() -> None:
        print(
            f"quaver: the CPU kernels are being compiled with {compiler}, once for all runs "
            f"(a compiler that does not end is given up after {TIMEOUT:.0f} s)",
            file=sys.stderr,
            flush=True,
        )

    timer = threading.Timer(PATIENCE, tell)
    timer.daemon = True
    if os.environ.get("LOCAL_RANK", "0") == "0":
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
