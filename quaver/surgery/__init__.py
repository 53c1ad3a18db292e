"""Finds modules by name and swaps or freezes them: all or none, and never by accident."""

from quaver.surgery.pattern import match

__all__ = ["match"]
