"""From a config to a model that trains: the build order, and eight-bit training as a library.

Reading order: build.py (the list), stages.py, rules.py, library.py, legality.py.
"""

from quaver.assembly.build import Assembly, assemble, plan_on_meta
from quaver.assembly.legality import ShardVerdict, judge, refuse_illegal, require_legal, shard_verdicts
from quaver.assembly.library import QuantizedModel, attach, quantize_modules, refresh
from quaver.assembly.rules import FACTORIES, MODULE_TYPES, bind_rules

__all__ = [
    "FACTORIES",
    "MODULE_TYPES",
    "Assembly",
    "QuantizedModel",
    "ShardVerdict",
    "assemble",
    "attach",
    "bind_rules",
    "judge",
    "plan_on_meta",
    "quantize_modules",
    "refresh",
    "refuse_illegal",
    "require_legal",
    "shard_verdicts",
]
