"""Ascend 950 (A5) through torch_npu; imported only where `low_precision.backend: npu` is chosen, or by `doctor`.

Reading order: tags.py, layouts.py, quantise.py, gemms.py, backend.py; device.py and gate.py decide at the start.
torch_npu itself is imported in one place, `device.probe`. May import: torch, formats, config (types), errors, and
the contract, ledger and codecs of backends.
"""

from quaver.backends.npu.backend import NPUBackend
from quaver.backends.npu.device import DeviceFacts, probe

__all__ = ["DeviceFacts", "NPUBackend", "probe"]
