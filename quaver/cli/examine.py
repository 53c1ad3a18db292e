"""What `quaver doctor` looks at: versions, CPU, compiler, backends, corpus and cache. Changes nothing.

torch_npu is imported where it is installed, as its backend's gate would; nothing runs on a device.
May import: training, backends, data, config.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import Any

import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from quaver.backends import native
from quaver.backends.capability import Need
from quaver.config import DataConfig, LowPrecisionConfig
from quaver.data.prepare import cache_root
from quaver.data.sources import DEFAULT_CORPUS, find_sources
from quaver.errors import ConfigError
from quaver.training.run_folder import why_not_writable

Needs = Callable[[str], list[Need]]  # of a format
Reasons = Callable[[str], Iterator[tuple[str, str]]]  # why a format cannot run, and the remedy

PACKAGES = ("torch", "transformers", "safetensors", "tokenizers", "pydantic", "numpy", "pyarrow")
BACKENDS = ("reference", "npu", "cuda")
RECIPES: tuple[dict[str, Any], ...] = (
    {"format": "mxfp8_e4m3", "scaling": "mx_block", "scale_rule": "floor"},
    {"format": "mxfp8_e4m3", "scaling": "mx_block", "scale_rule": "rceil"},
    {"format": "hif8", "scaling": "current"},
)


def examine() -> dict[str, Any]:
    """The findings as one JSON document; every entry that is missing says what to do."""
    return {
        "quaver": _version("quaver"),
        "versions": _versions(),
        "cpu": _cpu(),
        "compiler": _compiler(),
        "kernels": native.trial().to_json(),
        "backends": [_backend(name) for name in BACKENDS],
        "default_corpus": _default_corpus(),
        "cache": _cache(),
    }


def _versions() -> list[dict[str, Any]]:
    package = distribution("quaver")
    wanted = {
        r.name: ",".join(sorted(map(str, r.specifier), reverse=True))
        for r in map(Requirement, package.requires or ())
        if r.marker is None
    }
    wanted["python"] = package.metadata["Requires-Python"]
    found = {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}}
    return [
        {
            "name": name,
            "version": number,
            "supported": wanted[name],
            "ok": number is not None and SpecifierSet(wanted[name]).contains(number, prereleases=True),
        }
        for name, number in found.items()
    ]


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _cpu() -> dict[str, Any]:
    capabilities = torch.cpu.get_capabilities()
    return {
        "name": _cpu_model() or capabilities.get("cpu_name") or platform.machine(),
        "architecture": platform.machine(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "avx512_bf16": bool(capabilities.get("avx512_bf16", False)),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
    }


def _cpu_model() -> str | None:
    """The model's name as Linux gives it; None where it does not."""
    info = Path("/proc/cpuinfo")
    if not info.is_file():
        return None
    text = info.read_text(encoding="utf-8", errors="replace")
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found.group(1) if found else None


def _compiler() -> dict[str, Any]:
    return {
        "path": native.find_compiler(),
        "needed_for": "the CPU kernels; without one the same numbers come slower",
    }


def _backend(name: str) -> dict[str, Any]:
    """One backend: whether the gate that a run goes through lets each recipe pass, what it needs, and the remedy."""
    needs: Needs = _nothing
    reasons: Reasons = _no_reason
    if name == "npu":
        from quaver.backends.npu import device, gate

        npu = device.probe()
        needs, reasons = partial(gate.needs_of, npu), partial(gate.reasons, npu)
        found = {"device": npu.name, "versions": {"torch": torch.__version__, **npu.versions}}
    elif name == "cuda":
        from quaver.backends.cuda import device as gpu

        cuda = gpu.probe()
        needs, reasons = partial(gpu.needs_of, cuda), partial(gpu.reasons, cuda)
        found = {"device": cuda.name, "versions": dict(cuda.versions)}
    else:
        found = {"device": "cpu", "versions": {"torch": torch.__version__}}
    recipes = [_recipe(LowPrecisionConfig(enabled=True, **keys), needs, reasons) for keys in RECIPES]
    return {"name": name, "usable": any(one["usable"] for one in recipes), **found, "recipes": recipes}


def _nothing(format: str) -> list[Need]:
    return []


def _no_reason(format: str) -> Iterator[tuple[str, str]]:
    return iter(())


def _recipe(
    config: LowPrecisionConfig,
    needs: Needs,
    reasons: Reasons,
) -> dict[str, Any]:
    wanted, first = needs(config.format), next(reasons(config.format), None)
    there = f"{len(wanted)} operators and dtypes" if wanted else "torch alone"
    why, remedy = first if first is not None else (there, None)
    return {
        "id": config.recipe_id,
        "usable": first is None,
        "needs": why,
        "remedy": remedy,
        "requirements": [
            {"kind": need.kind, "name": need.name, "ok": need.missing is None, "missing": need.missing}
            for need in wanted
        ],
    }


def _default_corpus() -> dict[str, Any]:
    found: dict[str, Any] = {"name": DEFAULT_CORPUS}
    try:
        (source,) = find_sources(())
    except ConfigError as error:
        return found | {"path": error.where, "files": 0, "ok": False, "remedy": error.remedy}
    return found | {"path": str(source.root), "files": len(source.files), "ok": True, "remedy": None}


def _cache() -> dict[str, Any]:
    folder = cache_root(DataConfig())
    above = next(path for path in (folder, *folder.parents) if path.exists())
    writable = why_not_writable(folder) is None
    remedy = "point data.cache_dir or the variable QUAVER_CACHE to a writable folder"
    return {
        "path": str(folder),
        "exists": folder.is_dir(),
        "writable": writable,
        "free_bytes": shutil.disk_usage(above).free,
        "remedy": None if writable else remedy,
    }
