"""What a rank does to hold the npu backend against the reference: the same short training twice."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2] / "ranks"))


@contextmanager
def before_the_harness():
    """While it lasts, this machine's NPU is the harness; the gate is asked as ever."""
    from helpers import npu_harness
    from quaver.backends.npu import backend

    kept = backend.probe
    npu_harness.install()
    backend.probe = npu_harness.facts
    try:
        yield
    finally:
        backend.probe = kept


def both_backends(case: dict[str, Any]) -> dict[str, Any]:
    """{"reference": ..., "npu": ...}: what `cases.train_case` says of each, and how often the harness was called."""
    from cases import train_case

    from helpers import npu_harness

    answers = {}
    for backend in ("reference", "npu"):
        overrides = [*case.get("overrides", []), f"low_precision.backend={backend}"]
        npu_harness.calls.clear()
        with before_the_harness():
            answers[backend] = train_case({**case, "overrides": overrides})
        answers[backend]["calls"] = dict(npu_harness.calls)
    return answers
