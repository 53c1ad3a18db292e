"""What a rank does to hold the npu backend against the reference: the same short training twice.

Assembly is handed a backend that stands before the harness, in place of the one that this machine would get.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2] / "ranks"))


@contextmanager
def before_the_harness():
    """While it lasts, `low_precision.backend: npu` means the adapter on the harness; its gate is asked as ever."""
    from helpers import npu_harness
    from quaver.assembly import build

    kept = build.backend_for

    def chosen(config: Any, ledger: Any) -> Any:
        if config.backend != "npu":
            return kept(config, ledger)
        backend = npu_harness.backend(ledger)
        backend.check_capability(config)
        return backend

    build.backend_for = chosen
    try:
        yield
    finally:
        build.backend_for = kept


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
