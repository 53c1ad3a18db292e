"""What this process can know of its CUDA device, and the gate: MXFP8 on compute capability 10.x, else a reason.

A description is plain data, so the gate can be asked about a device that is not there. May import: torch, config
(types), capability, errors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from quaver.backends.capability import Need
from quaver.errors import CapabilityError

if TYPE_CHECKING:
    from quaver.config import LowPrecisionConfig

MAJOR = 10  # compute capability of the first GPUs that multiply E4M3 under E8M0 scales of 32 elements
FUNCTIONS = ("scaled_mm", "scaled_grouped_mm")
DTYPES = ("float8_e4m3fn", "float8_e8m0fnu")
OTHERWISE = "use backend: reference, which gives the same codes on this device and any other"


@dataclass(frozen=True)
class CudaFacts:
    """One CUDA device as the gate sees it.

    Args:
        name: e.g. "NVIDIA B200"; None where there is no device.
        capability: compute capability.
        versions: "torch" and "cuda" (of the build), None where it is not there.
        functions: those of torch.nn.functional that are needed and there.
        dtypes: those of torch likewise.
        trouble: why no device can be used, in a clause; None where one can.
        device_type: torch's name of the device that tensors live on.
    """

    name: str | None = None
    capability: tuple[int, int] | None = None
    versions: Mapping[str, str | None] = field(default_factory=dict)
    functions: frozenset[str] = frozenset(FUNCTIONS)
    dtypes: frozenset[str] = frozenset(DTYPES)
    trouble: str | None = None
    device_type: str = "cuda"


def probe() -> CudaFacts:
    """Asks torch; never raises for what is missing, but says it."""
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda}
    functions = frozenset(name for name in FUNCTIONS if hasattr(torch.nn.functional, name))
    dtypes = frozenset(name for name in DTYPES if hasattr(torch, name))
    if torch.version.cuda is None:
        return CudaFacts(None, None, versions, functions, dtypes, "this torch is built without CUDA")
    if not torch.cuda.is_available():
        return CudaFacts(None, None, versions, functions, dtypes, "torch finds no CUDA device")
    name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    return CudaFacts(name, capability, versions, functions, dtypes)


def needs_of(facts: CudaFacts, format: str) -> list[Need]:
    """Every function and dtype that a format needs, held against what is there; none for a format without kernels."""
    if format != "mxfp8_e4m3":
        return []
    return [
        *(Need("function", n, None if n in facts.functions else "not in this torch") for n in FUNCTIONS),
        *(Need("dtype", n, None if n in facts.dtypes else "not in this torch") for n in DTYPES),
    ]


def reasons(facts: CudaFacts, format: str) -> Iterator[tuple[str, str]]:
    """(why, remedy) of everything that keeps a format from running, the most basic first; none if it can run."""
    if format != "mxfp8_e4m3":
        yield f"no NVIDIA GPU multiplies {format}", OTHERWISE
    if facts.trouble is not None:
        yield facts.trouble, OTHERWISE
    elif facts.capability is None or facts.capability[0] != MAJOR:
        yield f"E8M0 scales of 32 elements need compute capability {MAJOR}.x", OTHERWISE
    for need in needs_of(facts, format):
        if need.missing is not None:
            yield f"the {need.kind} {need.name} is missing ({need.missing})", OTHERWISE


def check(facts: CudaFacts, config: LowPrecisionConfig) -> None:
    """CapabilityError in one sentence (device, function, versions) with its remedy, unless the recipe can run."""
    for why, remedy in reasons(facts, config.format):
        raise CapabilityError(
            f"backend cuda cannot run {config.recipe_id} (function {FUNCTIONS[0]}) on {describe(facts)}: {why}",
            where="low_precision.backend",
            remedy=remedy,
        )


def describe(facts: CudaFacts) -> str:
    """Device and versions in a few words."""
    device = "a machine without a CUDA device"
    if facts.name is not None:
        capability = "unknown" if facts.capability is None else ".".join(map(str, facts.capability))
        device = f"{facts.name} (compute capability {capability})"
    return f"{device} with torch {facts.versions.get('torch')}"
