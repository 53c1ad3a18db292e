"""The speed table: every figure is a ratio of two things that ran turn by turn in this process.

Reading order: timing.py (turns and medians), comparison.py (what a figure is), operators.py, experts.py, steps.py,
floor.py, stock.py, torchao_peer.py, loop.py (what is compared), machine.py, table.py (all of it, and running it).
"""

from quaver.bench.comparison import Comparison, Group, Result
from quaver.bench.sizes import FULL, Sizes
from quaver.bench.table import BenchReport, chosen_groups, groups, run_bench

__all__ = [
    "FULL",
    "BenchReport",
    "Comparison",
    "Group",
    "Result",
    "Sizes",
    "chosen_groups",
    "groups",
    "run_bench",
]
