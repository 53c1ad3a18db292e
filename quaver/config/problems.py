"""From what pydantic found to one `ConfigError` that names place, key, what was given and what is wanted.

Validators raise through `problem` and `not_supported`; everything else pydantic reports is told in the words
of `describe`. All problems of a config come together. May import pydantic, `describe` and `quaver.errors`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticCustomError

from quaver.config.describe import (
    Part,
    all_keys,
    in_words,
    legal_keys,
    section_of,
    type_at,
    value_in_words,
)
from quaver.errors import ConfigError

Path = tuple[Part, ...]


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a config.

    Attributes:
        place: where it was written: 'run.yaml:12', 'override 2', a class's name.
        path: the key, as a path from the top of the config.
        what: one sentence.
        remedy: one sentence, or None where `what` says it all.
    """

    place: str
    path: Path
    what: str
    remedy: str | None = None

    def __str__(self) -> str:
        return ": ".join(part for part in (self.place, dotted(self.path), self.what) if part)


def dotted(path: Iterable[Part]) -> str:
    """A path as an override would write it: `data.sources.0.path`; control characters are escaped."""
    return ".".join(text if (text := str(part)).isprintable() else ascii(text) for part in path)


def problem(what: str, *, remedy: str | None = None, key: str | None = None) -> PydanticCustomError:
    """What a validator raises: its own sentence and remedy; `key` blames one key of the validated section."""
    return PydanticCustomError("quaver", "{what}", {"what": what, "remedy": remedy, "key": key})


def not_supported(what: str, *, remedy: str | None = None, key: str | None = None) -> PydanticCustomError:
    """As `problem`, for a value that is understood but that this release does not do."""
    return problem(f"not supported: {what}", remedy=remedy, key=key)


def did_you_mean(given: object, known: Sequence[str]) -> str | None:
    """'did you mean learning_rate?' for the closest known name, else None."""
    close = difflib.get_close_matches(str(given), known, n=1, cutoff=0.6)
    return f"did you mean {close[0]}?" if close else None


def join_errors(problems: Sequence[Problem], source: str) -> ConfigError:
    """One ConfigError for all problems found in `source`."""
    if len(problems) == 1:
        return ConfigError(str(problems[0]), remedy=problems[0].remedy)
    lines = [f"{one}" + (f" ({one.remedy})" if one.remedy else "") for one in problems]
    return ConfigError(
        "\n  ".join([f"{len(problems)} errors in {source}:", *lines]),
        remedy="correct each of them; nothing was started",
    )


def from_validation(
    error: ValidationError, root: type[BaseModel], place: Callable[[Path], str]
) -> list[Problem]:
    """The problems that pydantic found below `root`; `place` says where a path was written."""
    return [_told(details, root, place) for details in error.errors(include_url=False)]


def _told(details: Any, root: type[BaseModel], place: Callable[[Path], str]) -> Problem:
    path: Path = tuple(details["loc"])
    kind = details["type"]
    if kind == "quaver":
        context = details["ctx"]
        if context["key"] is not None:
            path = (*path, context["key"])
        return Problem(place(path), path, context["what"], context["remedy"])
    if kind == "extra_forbidden":
        return Problem(place(path), path, "unknown key", _legal_instead(path, root))
    if kind == "missing" and isinstance(path[-1], int):  # a list that is too short: the list is what is wrong
        kind, path = "too_short", path[:-1]
    wanted = type_at(root, path)
    if wanted is None:
        return Problem(place(path), path, details["msg"])
    words = in_words(wanted)
    if kind == "finite_number":
        words = words.replace("a number", "a finite number", 1)
    if kind == "missing":
        return Problem(place(path), path, f"required key is missing, wanted {words}")
    given = details["input"]
    return Problem(place(path), path, f"wanted {words}, got {value_in_words(given)}", _hint(given, words))


def _legal_instead(path: Path, root: type[BaseModel]) -> str:
    """The remedy for an unknown key: the closest one here, the same key elsewhere, all legal ones."""
    section = section_of(type_at(root, path[:-1]))
    known = legal_keys(section) if section else []
    guess = did_you_mean(path[-1], known)
    if guess is None:
        elsewhere = [dotted(other) for other in all_keys(root) if other[-1] == path[-1]]
        guess = f"did you mean {' or '.join(elsewhere)}?" if elsewhere else None
    return f"{guess + ' ' if guess else ''}legal here: {', '.join(known)}"


def _hint(given: object, words: str) -> str | None:
    if isinstance(given, str):
        if "number" in words and given.replace(".", "", 1).lstrip("+-").isdigit():
            return "write the number without quotes"
        if "true or false" in words:
            return "write true or false, without quotes"
        if words.startswith("one of "):
            return did_you_mean(given, words.removeprefix("one of ").split(", "))
    elif words.startswith("text") and isinstance(given, bool | int | float):
        return "put the text in quotes"
    return None
