"""The memory that a run may use is the least of the machine's and of its control groups'."""

import os

import pytest

from quaver.training.memory import available_memory

PHYSICAL = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def system(root, groups: str, **limits: str):
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(groups)
    for path, text in limits.items():
        file = root / "sys/fs/cgroup" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    return root


@pytest.mark.parametrize(
    ("groups", "limits", "wanted"),
    [
        ("0::/\n", {"memory.max": "max"}, PHYSICAL),
        ("0::/\n", {"memory.max": "1048576"}, 1048576),
        ("0::/a/b\n", {"a/memory.max": "4096", "a/b/memory.max": "8192"}, 4096),
        ("0::/a/b\n", {"a/memory.max": "max", "a/b/memory.max": "8192"}, 8192),
        ("0::/host/path\n", {"memory.max": "12288"}, 12288),
        ("4:memory:/job\n1:cpu:/\n", {"memory/job/memory.limit_in_bytes": "65536"}, 65536),
        ("4:memory:/\n", {"memory/memory.limit_in_bytes": "9223372036854771712"}, PHYSICAL),
        ("3:cpuset:/job\n", {"cpuset/job/memory.limit_in_bytes": "1"}, PHYSICAL),
    ],
)
def test_the_least_limit_holds(tmp_path, groups: str, limits: dict, wanted: int) -> None:
    assert available_memory(system(tmp_path, groups, **limits)) == wanted


def test_without_control_groups_it_is_the_machines(tmp_path) -> None:
    assert available_memory(tmp_path) == PHYSICAL
