"""The kinds of error that Quaver raises for its users; every other room may import this one.

Each carries one sentence of *what* is wrong, one of *where* (config key and line, FQN, shape, file) and one of
*remedy*, so that the command line, a notebook and a log show the same thing. `exit_code` is what the command
line ends with: 2 where nothing was started, 3 where a run failed.
"""

from __future__ import annotations

from typing import Any


class QuaverError(Exception):
    """Base of all errors meant for users.

    Args:
        what: one sentence: what is wrong.
        where: the config key and its line, the FQN, the shape or the file.
        remedy: what to do about it.
    """

    exit_code = 3

    def __init__(self, what: str, *, where: str | None = None, remedy: str | None = None) -> None:
        self.what = what
        self.where = where
        self.remedy = remedy
        super().__init__(what, where, remedy)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (type(self), self.what, self.where, self.remedy, self.__dict__)

    def __str__(self) -> str:
        parts = [self.what]
        if self.where:
            parts.append(f"where: {self.where}")
        if self.remedy:
            parts.append(f"remedy: {self.remedy}")
        return "\n  ".join(parts)


def _rebuilt(
    kind: type[QuaverError], what: str, where: str | None, remedy: str | None, state: dict[str, Any]
) -> QuaverError:
    error = kind(what, where=where, remedy=remedy)
    error.__dict__.update(state)
    return error


class ConfigError(QuaverError):
    """A config, an override, a data source or a command line that cannot be used."""

    exit_code = 2


class PlanError(QuaverError):
    """A replacement, freezing or sharding plan that does not fit the model, or a build step out of order."""

    exit_code = 2


class CapabilityError(QuaverError):
    """A backend, device, kernel or version that this machine lacks; raised before a model is built."""

    exit_code = 2


class CheckpointError(QuaverError):
    """A checkpoint that cannot be written or read whole. `exit_code` 2 where a run could not start from it."""

    exit_code = 3


class RunFolderError(QuaverError):
    """A file of the run's folder that cannot be written: no room, or not writable any more."""

    exit_code = 3


class LedgerError(QuaverError):
    """The GEMMs that ran are not those that the plan promised: something went around the backend."""

    exit_code = 3


class StaleWeightError(QuaverError):
    """A quantised weight was read (or replaced) behind its master's back."""

    exit_code = 3


class NonFiniteError(QuaverError):
    """Too many non-finite steps in a row; the run ended without saving the broken state."""

    exit_code = 3
