"""Two gloo ranks equal one process that runs the same micro-batches and sums gradients in rank order, bit for bit.

The full matrix is `make test-matrix` (QUAVER_MATRIX=1); a selection that covers every pair of settings runs always.
"""

import itertools
import os

import pytest
from helpers.ranks import run_ranks

FORMATS, RESHARD, RECOMPUTE, ACCUMULATION = ("mxfp8", "hif8", "bf16"), (True, False), ("off", "full"), (1, 4)
FULL = [
    {"format": f, "reshard": r, "recompute": c, "accumulation": a}
    for f, r, c, a in itertools.product(FORMATS, RESHARD, RECOMPUTE, ACCUMULATION)
]
PAIRWISE = [
    ("mxfp8", True, "off", 1),
    ("mxfp8", False, "full", 4),
    ("hif8", True, "full", 4),
    ("hif8", False, "off", 1),
    ("bf16", True, "full", 1),
    ("bf16", False, "off", 4),
    ("mxfp8", True, "off", 4),
    ("hif8", False, "full", 1),
]


def selection() -> list[dict]:
    if os.environ.get("QUAVER_MATRIX"):
        return FULL
    keys = ("format", "reshard", "recompute", "accumulation")
    return [dict(zip(keys, values)) for values in PAIRWISE]


def test_the_selection_covers_every_pair() -> None:
    columns = [FORMATS, RESHARD, RECOMPUTE, ACCUMULATION]
    for (i, a), (j, b) in itertools.combinations(enumerate(columns), 2):
        for wanted in itertools.product(a, b):
            assert any((case[i], case[j]) == wanted for case in PAIRWISE), wanted


@pytest.fixture(scope="module")
def cases(corpus, tmp_path_factory) -> list[dict]:
    cache = tmp_path_factory.mktemp("cache")
    chosen = [
        *selection(),
        {
            "format": "mxfp8",
            "accumulation": 4,
            "late": True,
            "overrides": ["fsdp_config.reduce_every_micro_step=false"],
        },
    ]
    return [{**case, "ranks": 2, "corpus": str(corpus), "cache": str(cache)} for case in chosen]


@pytest.mark.slow
def test_two_ranks_equal_one_process(cases) -> None:
    one = run_ranks("cases", "reference_case", cases, ranks=1)
    two = run_ranks("cases", "train_case", cases, ranks=2)
    for case, alone, together in zip(cases, one, two):
        where = {k: v for k, v in case.items() if k not in ("corpus", "cache")}
        assert together["losses"] == alone["losses"], where
        assert together["norms"] == alone["norms"], where
        assert together["masters"] == alone["masters"], where
        assert all(float.fromhex(n) > 0.5 for n in alone["norms"]), "clipping was not active"
