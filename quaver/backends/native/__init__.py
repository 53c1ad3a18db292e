"""The reference backend's CPU kernels: C++ behind a plain C ABI, compiled on first use, equal to the torch codecs.

Reading order: bits.h, mx_lanes.h, mx_quantize.h, mx_quantize.cpp, mx_decode.cpp, mx_experts.cpp, hif8_codes.h,
hif8_lanes.h, hif8.cpp, widen.cpp; compiler.py, cache.py, build.py, kernels.py, packing.py, experts.py, detours.py,
memory.py. May import: torch, formats, errors.
"""

from quaver.backends.native.build import KernelStatus, find_compiler, trial
from quaver.backends.native.detours import described, detours
from quaver.backends.native.kernels import forget, status, usable, widened
from quaver.backends.native.memory import keep_freed_pages

__all__ = [
    "KernelStatus", "described", "detours", "find_compiler", "forget", "keep_freed_pages", "status", "trial", "usable",
    "widened",
]  # fmt: skip
