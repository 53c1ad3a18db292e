"""What this process can know of its NPU: name, SoC version, versions, operators and dtype constants.

`probe` is the only place that imports torch_npu. A description is plain data, so a gate can be asked about a device
that is not there. May import: torch, tags.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from quaver.backends.npu.tags import NEEDS


@dataclass(frozen=True)
class DeviceFacts:
    """One NPU as the gate sees it.

    Args:
        name: device name, e.g. "Ascend950DT"; None where no device answered.
        soc_version: torch_npu's number of the SoC; 260 is Ascend 950 (A5), 250 to 255 are A3.
        versions: "torch_npu" and "cann", each None where it is not there.
        ops: operators of torch.ops.npu -> the names of their arguments.
        tags: dtype constants of the torch_npu module.
        trouble: why torch_npu or the device cannot be used at all, in a clause; None where it can.
        device_type: torch's name of the device that tensors live on.
    """

    name: str | None = None
    soc_version: int | None = None
    versions: Mapping[str, str | None] = field(default_factory=dict)
    ops: Mapping[str, frozenset[str]] = field(default_factory=dict)
    tags: Mapping[str, int] = field(default_factory=dict)
    trouble: str | None = None
    device_type: str = "npu"


def probe() -> DeviceFacts:
    """Imports torch_npu, if there is one, and asks it; never raises for what is missing, but says it."""
    found = {"torch_npu": _installed("torch_npu"), "cann": None}
    if importlib.util.find_spec("torch_npu") is None:
        return DeviceFacts(versions=found, trouble="torch_npu is not installed")
    try:
        torch_npu: Any = importlib.import_module("torch_npu")
    except Exception as error:  # a missing CANN shows as ImportError, OSError or RuntimeError
        return DeviceFacts(versions=found, trouble=f"torch_npu cannot be imported ({_first_line(error)})")
    ops = registered(name for needs in NEEDS.values() for name in needs.ops)
    tags = {n: int(getattr(torch_npu, n)) for needs in NEEDS.values() for n in needs.tags if hasattr(torch_npu, n)}
    try:
        found["cann"] = torch_npu.npu.utils.get_cann_version() or None
        if not torch_npu.npu.is_available():
            return DeviceFacts(versions=found, ops=ops, tags=tags, trouble="torch_npu finds no device")
        name, soc = torch_npu.npu.get_device_name(), torch_npu.npu.utils.get_soc_version()
    except Exception as error:  # a driver that does not answer raises whatever it likes
        trouble = f"the device does not answer ({_first_line(error)})"
        return DeviceFacts(versions=found, ops=ops, tags=tags, trouble=trouble)
    return DeviceFacts(str(name), int(soc), found, ops, tags)


def registered(names: Iterable[str]) -> dict[str, frozenset[str]]:
    """Those operators of torch.ops.npu that exist now, with the names of their arguments."""
    found = {}
    for name in names:
        packet = getattr(torch.ops.npu, name, None)
        if packet is not None:
            found[name] = frozenset(argument.name for argument in packet.default._schema.arguments)
    return found


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
