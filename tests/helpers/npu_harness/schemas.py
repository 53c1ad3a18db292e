"""The registration strings as data, and their registration under the namespace `npu`."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

FILE = Path(__file__).resolve().parents[2] / "golden" / "npu" / "schemas_2.13.txt"
SCHEMAS = [line for line in FILE.read_text().splitlines() if line and not line.startswith("#")]

calls: Counter[str] = Counter()  # of each operator so far
_library: list[torch.library.Library] = []  # a library unregisters what it holds when it is collected


def define() -> bool:
    """Registers every string once; False if they were registered before."""
    if _library:
        return False
    if hasattr(torch.ops.npu, "npu_quant_matmul"):
        pytest.skip("torch_npu is loaded, and its own operators are registered; TORCH_DEVICE_BACKEND_AUTOLOAD=0")
    _library.append(torch.library.Library("npu", "DEF"))
    for schema in SCHEMAS:
        _library[0].define(schema)
    return True


def implement(name: str, function: Callable[..., Any]) -> None:
    """Puts a function behind an operator on CPU tensors, and counts its calls."""

    @functools.wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[name] += 1
        return function(*args, **kwargs)

    _library[0].impl(name, counted, "CPU")
