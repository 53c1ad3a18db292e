"""Which documents validate: decided by each document's own text, so it never depends on seed, order or run.

A document's number is a salted hash of its text, uniform in [0, 2^64). Numbers below the wanted fraction
validate. Hence adding files moves no other document, equal texts never stand on both sides, and runs that
differ in their seed share one validation set. Two rules keep small corpora whole: the document with the
greatest number of each source always trains, and of all others the one with the least number always
validates. May import `quaver.errors` and numpy.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from quaver.errors import ConfigError

SALT = "quaver train/validation split, version 1"
_SALTED = hashlib.sha256(SALT.encode())


def document_number(text: str) -> int:
    """The document's number in [0, 2^64): the first 8 bytes of sha256(SALT + UTF-8 text)."""
    digest = _SALTED.copy()
    digest.update(text.encode("utf-8"))
    return int.from_bytes(digest.digest()[:8], "big")


def choose_validation(
    numbers: Sequence[npt.NDArray[np.uint64]], fraction: float
) -> tuple[npt.NDArray[np.bool_], ...]:
    """Chooses the validation documents of all sources together.

    Args:
        numbers: per source, the numbers of its documents, uint64 [documents], none of them empty.
        fraction: the wanted share of documents, strictly between 0 and 1.

    Returns:
        per source, bool [documents]: True where the document validates.

    Raises:
        ConfigError: nothing would be left for validation (each source is one document, or copies of one).
    """
    if not 0.0 < fraction < 1.0:
        raise ConfigError(
            f"the validation fraction {fraction} is not between 0 and 1",
            where="data.validation_fraction",
            remedy="give a number such as 0.05",
        )
    everything = np.concatenate(numbers)
    trains_always = np.array([part.max() for part in numbers], dtype=np.uint64)
    others = everything[~np.isin(everything, trains_always)]
    if others.size == 0:
        raise ConfigError(
            f"the corpus has {np.unique(everything).size} different document(s) in {len(numbers)} source(s): "
            "none is left for validation",
            where="data.sources",
            remedy="add a document: each .txt file is one, and so is each .jsonl line and each parquet row",
        )
    threshold = max(int(fraction * 2**64), int(others.min()) + 1)
    return tuple(
        (part < np.uint64(min(threshold, 2**64 - 1))) & ~np.isin(part, trains_always) for part in numbers
    )
