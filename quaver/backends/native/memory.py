"""Keeps the C library from handing freed tensors back to the system, only to fault the same pages in again.

A training step frees and asks for the same large tensors over and over. By default glibc maps each of them anew, or
trims its heap after each, and the system clears every page again: a quarter of the time of a step of small experts
in eight bits, a twentieth in BF16. With the two limits below freed memory stays with the process, whose peak is the
same. May import: Python's own library.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache

TRIM_BYTES = 2**31 - 1  # free bytes at the heap's end that are kept (an int)
MMAP_BYTES = 32 << 20  # allocations from this size on are still mapped one by one; glibc takes no more
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


@cache
def keep_freed_pages() -> bool:
    """Sets the two limits for this process, once; False where it is not glibc's, or the user has set them.

    A user's own settings are MALLOC_TRIM_THRESHOLD_, MALLOC_MMAP_THRESHOLD_ and GLIBC_TUNABLES.
    """
    if any(name.startswith("MALLOC_") for name in os.environ) or "malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version") or not hasattr(library, "mallopt"):
        return False
    trimmed = library.mallopt(_M_TRIM_THRESHOLD, TRIM_BYTES)
    mapped = library.mallopt(_M_MMAP_THRESHOLD, MMAP_BYTES)
    return bool(trimmed and mapped)
