"""The capability gate: whether this device can run a recipe, decided before a model is built.

Ascend 950 (A5) is known by its name and by SoC version 260; 250 and up alone would let A3 through, which has no
eight-bit float kernels. May import: config (types), capability, errors, device, tags.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from quaver.backends.capability import Need
from quaver.backends.npu.device import DeviceFacts
from quaver.backends.npu.tags import NEEDS
from quaver.errors import CapabilityError

if TYPE_CHECKING:
    from quaver.config import LowPrecisionConfig

NAMES = ("Ascend950", "Ascend910_95")  # the second is the name of early units
SOC_VERSION = 260
INSTALL = "install CANN and torch_npu for this torch on an Ascend 950 machine (docs/ascend.md)"
OTHERWISE = "or use backend: reference, which computes the same numbers on any torch device"


def needs_of(facts: DeviceFacts, format: str) -> list[Need]:
    """Every operator and dtype constant that a format needs, held against what is there."""
    wanted = NEEDS[format]
    ops = (Need("op", name, _why_not(facts, name, arguments)) for name, arguments in wanted.ops.items())
    tags = (Need("dtype", name, _wrong_tag(facts, name, value)) for name, value in wanted.tags.items())
    return [*ops, *tags]


def _why_not(facts: DeviceFacts, name: str, arguments: tuple[str, ...]) -> str | None:
    if name not in facts.ops:
        return "not registered"
    unknown = [argument for argument in arguments if argument not in facts.ops[name]]
    return f"takes no {', '.join(unknown)}" if unknown else None


def _wrong_tag(facts: DeviceFacts, name: str, value: int) -> str | None:
    if name not in facts.tags:
        return "not there"
    return None if facts.tags[name] == value else f"is {facts.tags[name]} and not {value}"


def reasons(facts: DeviceFacts, format: str) -> Iterator[tuple[str, str]]:
    """(why, remedy) of everything that keeps a format from running, the most basic first; none if it can run."""
    if facts.trouble is not None:
        yield facts.trouble, f"{INSTALL}, {OTHERWISE}"
    elif not any(name in (facts.name or "") for name in NAMES) or facts.soc_version != SOC_VERSION:
        yield (
            f"its kernels need an Ascend 950 (A5), SoC version {SOC_VERSION}, and this SoC is {facts.soc_version}",
            f"run on an Ascend 950, {OTHERWISE}",
        )
    for need in needs_of(facts, format):
        if need.missing is not None:
            word = "op" if need.kind == "op" else "the dtype constant"
            yield f"{word} {need.name} is missing ({need.missing})", f"{INSTALL}, {OTHERWISE}"


def check(facts: DeviceFacts, config: LowPrecisionConfig) -> None:
    """CapabilityError in one sentence (device, operator, version) with its remedy, unless the recipe can run."""
    if config.format not in NEEDS:
        raise CapabilityError(
            f"backend npu has no kernels for format {config.format!r}",
            where="low_precision.format",
            remedy=f"use one of {sorted(NEEDS)}, {OTHERWISE}",
        )
    first = next(reasons(facts, config.format), None)
    if first is None:
        return
    why, remedy = first
    op = next((need.name for need in needs_of(facts, config.format) if need.missing), None)
    needed = f"op {op}" if op is not None else f"op {next(iter(NEEDS[config.format].ops))}"
    raise CapabilityError(
        f"backend npu cannot run {config.recipe_id} ({needed}) on {describe(facts)}: {why}",
        where="low_precision.backend",
        remedy=remedy,
    )


def describe(facts: DeviceFacts) -> str:
    """Device and versions in a few words."""
    device = facts.name or "a machine without an NPU"
    torch_npu, cann = facts.versions.get("torch_npu"), facts.versions.get("cann")
    return f"{device} with {f'torch_npu {torch_npu}' if torch_npu else 'no torch_npu'}" + (
        f" and CANN {cann}" if cann else ""
    )
