"""torch.ops.npu on the CPU: the real registration strings, with the exact reference behind seven operators.

Each implementation learns format, rule, layout and transposes from its arguments alone (tags, shapes, strides), so an
adapter that passes a wrong one gets an error or other numbers. Nothing here uses the adapter's own conversions.

    harness.install()                       # once a process; registers the operators
    backend = harness.backend()             # the npu backend, told that it stands before an Ascend 950
"""

from __future__ import annotations

from typing import Any

from helpers.npu_harness.products import npu_grouped_matmul, npu_quant_matmul
from helpers.npu_harness.quantising import (
    npu_dynamic_mx_quant,
    npu_dynamic_mx_quant_with_dual_axis,
    npu_dynamic_quant,
    npu_grouped_dynamic_mx_quant,
    npu_quantize,
)
from helpers.npu_harness.refusal import HarnessError
from helpers.npu_harness.schemas import SCHEMAS, calls, define, implement

OPERATORS = {
    function.__name__: function
    for function in (
        npu_dynamic_mx_quant,
        npu_dynamic_mx_quant_with_dual_axis,
        npu_grouped_dynamic_mx_quant,
        npu_dynamic_quant,
        npu_quantize,
        npu_quant_matmul,
        npu_grouped_matmul,
    )
}

__all__ = ["OPERATORS", "SCHEMAS", "HarnessError", "backend", "calls", "facts", "install"]


def install() -> None:
    """Registers every string, and the operators behind those that are computed; the second call does nothing."""
    if define():
        for name, function in OPERATORS.items():
            implement(name, function)


def facts(**changes: Any) -> Any:
    """An Ascend 950 as the gate would see it, on tensors of the CPU."""
    from dataclasses import replace

    from quaver.backends.npu.device import DeviceFacts, registered

    tags = {"hifloat8": 290, "float8_e4m3fn": 292, "float8_e8m0fnu": 293}
    versions = {"torch_npu": "2.13.0", "cann": "9.1.0"}
    known = DeviceFacts("Ascend950DT_9582", 260, versions, registered(OPERATORS), tags, device_type="cpu")
    return replace(known, **changes)


def backend(ledger: Any = None) -> Any:
    """The npu backend with this harness as its device, checked for nothing yet."""
    from quaver.backends.npu import NPUBackend

    install()
    return NPUBackend(ledger, device=facts())
