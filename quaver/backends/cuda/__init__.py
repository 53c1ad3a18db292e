"""NVIDIA GPUs of compute capability 10.x; imported only where `low_precision.backend: cuda` is chosen, or by `doctor`.

Reading order: device.py (what is needed), swizzle.py, operands.py, backend.py. May import: torch, config (types),
errors, and the contract, ledger and reference of backends.
"""

from quaver.backends.cuda.backend import CUDABackend
from quaver.backends.cuda.device import CudaFacts, probe

__all__ = ["CUDABackend", "CudaFacts", "probe"]
