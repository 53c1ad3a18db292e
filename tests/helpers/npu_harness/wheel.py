"""An installed torch_npu wheel as a witness: its registration strings, and its shape functions without a device.

The wheel's library needs CANN, so it cannot be imported on an ordinary machine; its strings are read from the file, and
its shape functions, which are Python, are loaded beside a few constants that stand for the rest.
"""

from __future__ import annotations

import importlib
import mmap
import re
import sys
import types
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import torch

from helpers.npu_harness.schemas import SCHEMAS

CONSTANTS = {
    "int4": 285, "hifloat8": 290, "float8_e5m2": 291, "float8_e4m3fn": 292, "float8_e8m0fnu": 293,
    "float4_e2m1fn_x2": 296, "float4_e1m2fn_x2": 297,
}  # fmt: skip
ASCEND_950 = 260
STRING = re.compile(
    rb"(?<=\0)_?[a-z][A-Za-z0-9_]*(?:\.[A-Za-z_0-9]+)?"  # name and overload
    rb"\((?:Tensor|Scalar|int|SymInt|\*)[^\0\n]*\) -> [^\0\n]+(?=\0)"
)

_others = torch.library.Library("npu", "FRAGMENT")


def folder() -> Path | None:
    """Where the wheel's package lies; None where it is not installed."""
    try:
        found = distribution("torch_npu")
    except PackageNotFoundError:
        return None
    return Path(str(found.locate_file("torch_npu")))


def missing_strings(package: Path, schemas: list[str]) -> list[str]:
    """Those registration strings that the wheel's library does not hold, whole."""
    with (package / "lib" / "libtorch_npu.so").open("rb") as file:
        library = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return [schema for schema in schemas if library.find(b"\0" + schema.encode() + b"\0") < 0]


def all_strings(package: Path) -> list[str]:
    """Every registration string of the wheel's library."""
    library = (package / "lib" / "libtorch_npu.so").read_bytes()
    return sorted({found.decode() for found in STRING.findall(library)})


def load_shape_functions(package: Path) -> None:
    """Registers the wheel's shape functions for meta tensors, on an SoC that calls itself Ascend 950."""
    for schema in all_strings(package):
        # the file of functions names operators that our own does not hold; some take classes of the library
        if schema not in SCHEMAS and "torch.classes" not in schema:
            _others.define(schema)
    _stand_in("torch_npu", path=package, **CONSTANTS)
    _stand_in("torch_npu.utils", path=package / "utils")
    _stand_in("torch_npu.npu", path=package / "npu")
    _stand_in("torch_npu.npu.utils", get_cann_version=lambda *_: "9.1.0")
    _stand_in("torch_npu.npu._backends", get_soc_version=lambda: ASCEND_950)
    _stand_in("torch_npu.op_plugin", path=package / "op_plugin")
    _stand_in("torch_npu.op_plugin.meta", path=package / "op_plugin" / "meta")
    importlib.import_module("torch_npu.op_plugin.meta._meta_registrations")


def _stand_in(name: str, path: Path | None = None, **members: Any) -> None:
    module = types.ModuleType(name)
    module.__dict__.update(members)
    if path is not None:
        module.__path__ = [str(path)]  # its other files are the wheel's own
    sys.modules[name] = module
    above, _, last = name.rpartition(".")
    if above:
        setattr(sys.modules[above], last, module)
