"""Makes `tests/helpers` importable from every test folder, and leaves no process group behind a file of tests."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True, scope="module")
def no_process_group_stays() -> Iterator[None]:
    """A group that one file of tests starts must not decide what the next one finds."""
    yield
    if "torch.distributed" in sys.modules:
        from torch import distributed

        if distributed.is_available() and distributed.is_initialized():
            distributed.destroy_process_group()
