"""Drops two known messages of torchao, which transformers imports where it is installed; nothing else.

torchao tries each of its compiled extensions, for GPUs and other Pythons too, and warns of each that does
not load; and it registers enums in a way that torch has deprecated. Neither says anything about a run of
Quaver, which uses no part of it. May import: nothing of Quaver.
"""

from __future__ import annotations

import logging
import re

# logger -> the message that is dropped; the record is matched before its handlers see it
KNOWN_NOISE = {
    "torchao": re.compile(r"Failed to load \S*torchao/_C\S*\.so: "),
    "torch.utils._pytree": re.compile(r"<enum '\w+'> is an Enum subclass and is now natively supported"),
}


class _Drop(logging.Filter):
    def __init__(self, pattern: re.Pattern[str]) -> None:
        super().__init__()
        self._pattern = pattern

    def filter(self, record: logging.LogRecord) -> bool:
        return self._pattern.match(record.getMessage()) is None


def drop_known_noise() -> None:
    """Installs the filters; called before transformers is imported."""
    for name, pattern in KNOWN_NOISE.items():
        logger = logging.getLogger(name)
        if not any(isinstance(one, _Drop) for one in logger.filters):
            logger.addFilter(_Drop(pattern))
