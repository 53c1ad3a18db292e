"""From a config to a model that trains: the build order, and eight-bit training as a library.

Reading order: build.py (the list), stages.py, rules.py, own_loop.py, legality.py. Names are handed out on first use:
`quantize_modules` on a plain module needs none of what the build of a Hugging Face model imports.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quaver.assembly.build import Assembly, assemble, plan_on_meta
    from quaver.assembly.legality import ShardVerdict, judge, refuse_illegal, require_legal, shard_verdicts
    from quaver.assembly.own_loop import QuantizedModel, attach, quantize_modules, refresh
    from quaver.assembly.rules import FACTORIES, MODULE_TYPES, bind_rules

_HOMES = {
    "Assembly": "build",
    "assemble": "build",
    "plan_on_meta": "build",
    "ShardVerdict": "legality",
    "judge": "legality",
    "refuse_illegal": "legality",
    "require_legal": "legality",
    "shard_verdicts": "legality",
    "QuantizedModel": "own_loop",
    "attach": "own_loop",
    "quantize_modules": "own_loop",
    "refresh": "own_loop",
    "FACTORIES": "rules",
    "MODULE_TYPES": "rules",
    "bind_rules": "rules",
}

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


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"quaver.assembly.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'quaver.assembly' has no attribute {name!r}")
