"""What a config would build, told from the meta device: structure, parameters, hits and shard verdicts.

Reading order: report.py (the plan), structure.py (the module tree, collapsed), names.py (FQNs, collapsed).
"""

from quaver.planning.names import collapse
from quaver.planning.report import PlanReport, plan, plan_report, ranks_of
from quaver.planning.structure import Node, structure

__all__ = ["Node", "PlanReport", "collapse", "plan", "plan_report", "ranks_of", "structure"]
