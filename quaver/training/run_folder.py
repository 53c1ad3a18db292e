"""A run's folder: where it lies, what it holds, and what the machine was. May import: config, data, disk, errors."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from quaver.backends import native
from quaver.config import RunConfig, dump_yaml
from quaver.data import LibraryTokenizer, Tokenizer
from quaver.errors import ConfigError
from quaver.training.disk import write_json, write_text

RUNS = Path("runs")
_PACKAGES = ("quaver", "torch", "transformers", "safetensors", "tokenizers", "numpy", "pydantic")


def check_run_folder(out: str | os.PathLike[str] | None, runs: Path = RUNS) -> None:
    """The errors of `create_run_folder` that can be told without making anything."""
    if out is not None and os.path.lexists(out):
        raise _exists(Path(out))
    wanted = Path(out) if out is not None else runs
    reason = why_not_writable(wanted)
    if reason is not None:
        raise _not_makeable(reason, wanted)


def why_not_writable(folder: Path) -> str | None:
    """Why `folder` could not be made or written into, as far as its nearest existing ancestor tells; else None.

    A file is made there and removed: permission bits know neither of /proc nor of a file system mounted read-only.
    """
    above = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    if not above.is_dir():
        return f"{above} is no folder"
    try:
        with tempfile.TemporaryFile(prefix=".quaver-", dir=above):
            return None
    except OSError as error:
        return f"{above} is not writable ({error.strerror or error})"


def find_run_folder(name: str, out: str | os.PathLike[str] | None = None, runs: Path = RUNS) -> Path | None:
    """The folder that a resumed run goes on in: `out`, else the newest of runs/<name>*; None if there is none."""
    if out is not None:
        folder = Path(out)
        if folder.exists() and not (folder / "config.yaml").is_file():
            raise ConfigError(
                f"{folder} is not the folder of a run: it has no config.yaml",
                where="--resume --out",
                remedy="name the folder of the run to go on with",
            )
        return folder if folder.exists() else None
    numbered = re.compile(re.escape(name) + r"(-\d+)?")
    found = [
        path
        for path in (runs.iterdir() if runs.is_dir() else [])
        if numbered.fullmatch(path.name) and (path / "config.yaml").is_file()
    ]
    return max(found, key=lambda path: (path / "config.yaml").stat().st_mtime_ns, default=None)


def create_run_folder(name: str, out: str | os.PathLike[str] | None = None, runs: Path = RUNS) -> Path:
    """Makes the folder: `out`, which must not exist, or `runs/<name>`, numbered -2, -3, ... where taken."""
    try:
        if out is not None:
            folder = Path(out)
            if os.path.lexists(folder):
                raise _exists(folder)
            folder.mkdir(parents=True)
            return folder
        number = 1
        while True:
            folder = runs / (name if number == 1 else f"{name}-{number}")
            try:
                folder.mkdir(parents=True)
                return folder
            except FileExistsError:
                if runs.exists() and not runs.is_dir():
                    raise
                number += 1
    except OSError as error:
        raise _not_makeable(str(error.strerror or error), Path(error.filename or out or runs)) from error


def _exists(folder: Path) -> ConfigError:
    return ConfigError(
        f"{folder} exists already, and nothing is overwritten",
        where="--out",
        remedy="name another folder, or leave --out away for a numbered one under runs/",
    )


def _not_makeable(reason: str, wanted: Path) -> ConfigError:
    return ConfigError(
        f"the run's folder cannot be made: {reason}",
        where=str(wanted),
        remedy="choose a writable place with --out",
    )


def environment(config: RunConfig, device: torch.device, **more: Any) -> dict[str, Any]:
    """What a reader needs to judge a run's numbers: versions, commit, seed, device, threads."""
    return {
        "versions": {name: _version(name) for name in _PACKAGES} | {"python": platform.python_version()},
        "commit": _commit(),
        "seed": config.seed,
        "recipe": config.low_precision.recipe_id if config.low_precision.enabled else None,
        "backend": config.low_precision.backend if config.low_precision.enabled else None,
        "device": str(device),
        "threads": torch.get_num_threads(),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "kernels": native.described() if config.low_precision.enabled else None,
        "platform": platform.platform(),
        "command": sys.argv,
        **more,
    }


def write_config(folder: Path, config: RunConfig) -> None:
    """The resolved config, re-runnable as it is.

    Raises:
        RunFolderError: the system refused.
    """
    write_text(folder / "config.yaml", dump_yaml(config))


def write_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    """tokenizer.json and tokenizer_config.json as Hugging Face names them; the byte tokeniser needs neither.

    Raises:
        RunFolderError: the system refused.
    """
    if not isinstance(tokenizer, LibraryTokenizer):
        return
    write_text(folder / "tokenizer.json", tokenizer.definition)
    write_json(folder / "tokenizer_config.json", {"eos_token": tokenizer.eos_token})


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of the checkout that this package lies in, marked when it has changes; None outside one."""
    here = Path(__file__).resolve().parents[2]
    if not (here / ".git").exists():
        return None
    try:
        head = subprocess.run(
            ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=40"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return head.stdout.strip()
