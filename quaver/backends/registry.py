"""From `low_precision.backend` to the one backend that runs; there is no "auto, else".

The reference backend comes with this room; one for a device is imported only when it is chosen.
May import: config, the backends.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from quaver.backends.codecs import BUILTIN_CODECS, Codec
from quaver.backends.contract import Backend
from quaver.backends.ledger import Ledger
from quaver.backends.reference import ReferenceBackend

if TYPE_CHECKING:
    from quaver.config import LowPrecisionConfig


def backend_for(
    config: LowPrecisionConfig,
    ledger: Ledger,
    *,
    codecs: Mapping[str, Codec] | None = None,
    check: bool = True,
) -> Backend:
    """The chosen backend, checked for the recipe; CapabilityError where this build or machine lacks it.

    Args:
        config: names the backend and the recipe.
        ledger: where the backend records its GEMMs.
        codecs: of formats beside the built-in ones, for the reference backend.
        check: False where nothing will be computed, as in a plan.
    """
    backend: Backend
    if config.backend == "npu":
        from quaver.backends.npu import NPUBackend

        backend = NPUBackend(ledger)
    elif config.backend == "cuda":
        from quaver.backends.cuda import CUDABackend

        backend = CUDABackend(ledger)
    else:
        backend = ReferenceBackend(ledger, {**BUILTIN_CODECS, **(codecs or {})})
    if check:
        backend.check_capability(config)
    return backend
