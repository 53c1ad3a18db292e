"""How much memory this process may use: the machine's, or what its container was given, whichever is less.

May import: nothing of Quaver.
"""

from __future__ import annotations

import os
from pathlib import Path

# control groups (kernel.org, admin-guide/cgroup-v2 and cgroup-v1/memory): where each version keeps its limit
_V2, _V1 = ("", "memory.max"), ("memory", "memory.limit_in_bytes")


def available_memory(root: Path = Path("/")) -> int:
    """Bytes; the limit of every group above this process counts, since each holds for all below it.

    Args:
        root: of the file system; another one in tests.
    """
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([physical, *_limits(root)])


def _limits(root: Path) -> list[int]:
    groups = root / "proc/self/cgroup"
    if not groups.is_file():
        return []  # not Linux: no groups
    found = []
    for line in groups.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        mount, name = _V1 if controllers else _V2
        top = root / "sys/fs/cgroup" / mount
        # inside a container its own group is often mounted as the top, whatever path the line gives
        parts = Path(path.lstrip("/")).parts
        for depth in range(len(parts) + 1):
            file = top.joinpath(*parts[:depth], name)
            text = file.read_text().strip() if file.is_file() else ""
            if text.isdigit():  # "max": no limit
                found.append(int(text))
    return found
