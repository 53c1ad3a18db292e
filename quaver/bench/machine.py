"""On what the figures were made: processor, threads, versions, the kernels that ran, and how busy it was.

May import: torch, backends (which kernels ran).
"""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path
from typing import Any

import torch
import transformers

from quaver.backends import native

# what the speed of BF16 GEMMs and of the kernels depends on
FEATURES = ("avx2", "avx512f", "avx512bw", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_tile")


def describe_machine() -> dict[str, Any]:
    """The machine as `quaver bench --json` names it."""
    return {
        "cpu": _cpu_model() or platform.processor() or platform.machine(),
        "architecture": platform.machine(),
        "cpu_features": _features(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "kernels": native.described(),
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY"),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "load_average_before": load_average(),
    }


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0))


def load_average() -> float:
    """Of the last minute: a figure made beside other work says so."""
    return round(os.getloadavg()[0], 2)


def _cpuinfo(key: str) -> str | None:
    info = Path("/proc/cpuinfo")
    if not info.is_file():
        return None
    found = re.search(rf"^{key}\s*:\s*(.+)$", info.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
    return found.group(1) if found else None


def _cpu_model() -> str | None:
    return _cpuinfo("model name")


def _features() -> list[str]:
    """Features that this processor has, by Linux's names; elsewhere by torch's."""
    flags = _cpuinfo("flags")
    if flags is not None:
        held = set(flags.split())
        return [name for name in FEATURES if name in held]
    capabilities = torch.cpu.get_capabilities()
    return [name for name in FEATURES if capabilities.get(name)]
