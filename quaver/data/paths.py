"""Paths as users write them, made absolute, with one clear error where they lead nowhere.

May import `quaver.errors` and the standard library.
"""

from __future__ import annotations

import os
from pathlib import Path

from quaver.errors import ConfigError


def user_path(given: str, key: str) -> Path:
    """The absolute path of `given` ("~" is the home folder); it need not exist.

    Raises:
        ConfigError: names no possible path (an unknown user's home, a NUL).
    """
    try:
        path = Path(given).expanduser().absolute()
    except RuntimeError as error:
        raise ConfigError(f"the path {given!r} cannot be resolved: {error}", where=key) from error
    if not given or "\0" in given:
        raise ConfigError(f"the path {given!r} is no path", where=key, remedy="give an existing path")
    return path


def existing_path(given: str, key: str, remedy: str) -> tuple[Path, os.stat_result]:
    """As `user_path`, with the status of what is there (links followed); ConfigError where nothing is."""
    path = user_path(given, key)
    try:
        return path, path.stat()
    except OSError as error:
        raise ConfigError(
            f"the path {given!r} cannot be used: {error.strerror}", where=f"{key}, {path}", remedy=remedy
        ) from error
