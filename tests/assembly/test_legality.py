"""Shard verdicts against the figures of the source's own model at 8 ranks."""

import pytest

from quaver.assembly import judge
from quaver.config import FSDPConfig

CASES = [
    ((2048, 2048), 8, {}, "aligned", 256),
    ((3136, 2048), 8, {}, "exact", 392),  # kv_a_proj_with_mqa
    ((10944, 2048), 8, {}, "exact", 1368),  # dense gate and up
    ((2816, 2048), 8, {}, "aligned", 352),  # shared experts: a multiple of 32, not of 64
    ((2816, 2048), 8, {"strict_scale_tiles": True}, "illegal", 352),
    ((3136, 2048), 8, {"strict_scale_tiles": True}, "illegal", 392),
    ((10944, 2048), 8, {"strict_scale_tiles": True, "fallback_to_unsharded": True}, "replicated", 1368),
    ((64, 2816, 2048), 8, {}, "aligned", 8),
    ((64, 2816, 2048), 8, {"strict_scale_tiles": True}, "aligned", 8),
    ((64, 2816, 2048), 3, {}, "illegal", 22),
    ((64, 2816, 2048), 3, {"fallback_to_unsharded": True}, "replicated", 22),
    ((100, 64), 3, {}, "illegal", 34),
    ((3136, 2048), 1, {}, "aligned", 3136),
]


@pytest.mark.parametrize(("shape", "ranks", "options", "verdict", "rows"), CASES)
def test_verdicts(shape, ranks, options, verdict, rows) -> None:
    found = judge("w", shape, ranks, FSDPConfig(**options))
    assert (found.verdict, found.rows_per_rank) == (verdict, rows)
    assert bool(found.reason) == (verdict != "aligned")
