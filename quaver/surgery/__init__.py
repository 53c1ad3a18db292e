"""Finds modules by name and swaps or freezes them: all or none, and never by accident."""

from quaver.surgery.freeze import freeze
from quaver.surgery.install import Replacement, Replacements, build_replacements, install
from quaver.surgery.pattern import match
from quaver.surgery.plan import BoundRule, PatternHits, ReplacementPlan, Target, compile_plan

__all__ = [
    "match",
    "BoundRule",
    "PatternHits",
    "Target",
    "ReplacementPlan",
    "compile_plan",
    "Replacement",
    "Replacements",
    "build_replacements",
    "install",
    "freeze",
]
