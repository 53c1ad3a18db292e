"""What a backend needs of its device, one thing at a time, for gates and for `quaver doctor`. Imports nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Need:
    """One operator, function or dtype that a format needs, and why it is not met (None: it is met)."""

    kind: Literal["op", "function", "dtype"]
    name: str
    missing: str | None
