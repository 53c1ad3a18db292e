"""From `low_precision.backend` to the one backend that runs; there is no "auto, else".

The reference backend comes with this room; one for a device is imported only when it is chosen.
May import: config, errors, the backends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quaver.backends.contract import Backend
from quaver.backends.ledger import Ledger
from quaver.errors import CapabilityError

if TYPE_CHECKING:
    from quaver.config import LowPrecisionConfig


def backend_for(config: LowPrecisionConfig, ledger: Ledger) -> Backend:
    """The chosen backend, checked for the recipe; CapabilityError where this build or machine lacks it."""
    if config.backend == "npu":
        from quaver.backends.npu import NPUBackend

        npu = NPUBackend(ledger)
        npu.check_capability(config)
        return npu
    if config.backend != "reference":
        raise CapabilityError(
            f"not supported: backend {config.backend!r} is not part of this release",
            where="low_precision.backend",
            remedy="use backend: reference, which computes the same numbers on any torch device",
        )
    from quaver.backends.reference import ReferenceBackend

    backend = ReferenceBackend(ledger)
    backend.check_capability(config)
    return backend
