"""Dotted overrides: `optimizer.lr=1e-4`, `data.sources.0.path=x`, values in YAML, the last one wins.

They are laid onto the parsed document before it is validated, so that an override meets exactly the checks
that a file meets, with "override 2" where the file's errors have their line.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel

from quaver.config.describe import Part, field_for, keys_of, section_of, type_at, value_in_words
from quaver.config.document import MAX_DEPTH, MAX_NODES, Document, parse_yaml
from quaver.config.problems import Path, Problem, dotted, join_errors


class Override(str):
    """An override that messages call by its own place ("--name") rather than by its number."""

    place: str

    def __new__(cls, text: str, *, place: str) -> Override:
        """`text` as any override; `place` is what messages say of it."""
        made = super().__new__(cls, text)
        made.place = place
        return made


def apply_overrides(document: Document, overrides: str | Sequence[str], schema: type[BaseModel]) -> Document:
    """The document with each `key.path=value` laid onto it, in order; a text alone is one override.

    Raises:
        ConfigError: an override without `=` or value, with YAML that cannot be read, or whose path
            goes through something that has no keys.
    """
    if not overrides:
        return document
    if isinstance(overrides, str):
        overrides = [overrides]
    layered = _Layered(document, schema)
    problems: list[Problem] = []
    for number, text in enumerate(overrides, start=1):
        place = getattr(text, "place", f"override {number}")
        if not isinstance(text, str):
            wanted = f"wanted the text of an override, got {value_in_words(text)}"
            problems.append(Problem(place, (), wanted, 'write "key.path=value"'))
            continue
        key, equals, raw = text.partition("=")
        parts = key.strip().split(".")
        if not equals or not all(parts) or not raw.strip() or len(parts) > MAX_DEPTH:
            remedy = "write key.path=value; null, '' and [] are values too"
            problems.append(Problem(place, (), f"{text!r} is no override", remedy))
            continue
        if raw.lstrip()[0] in "*&":
            what = f"a value that begins with {raw.lstrip()[0]} is a reference in YAML, not text"
            problems.append(Problem(place, tuple(parts), what, _quoted(parts, raw)))
            continue
        found = layered.put(parts, parse_yaml(raw, place, place=place).data, place)
        if found is not None:
            problems.append(found)
    if problems:
        raise join_errors(problems, "the overrides")
    return Document(layered.data, document.source, layered.places)


def _quoted(parts: list[str], raw: str) -> str:
    """The remedy for text that YAML reads as something else: the override as a shell takes it."""
    text = raw.strip().strip("'\"")
    return f"put the value in quotes, and the whole in the shell's: '{'.'.join(parts)}=\"{text}\"'"


class _Layered:
    """A copy of a document's data and places that overrides are put into."""

    def __init__(self, document: Document, schema: type[BaseModel]) -> None:
        self.data = copy.deepcopy(document.data)
        self.places = dict(document.places)
        self._schema = schema

    def put(self, parts: list[str], value: Any, place: str) -> Problem | None:
        """Puts `value` at the path, making what is missing on the way; a Problem where the path cannot go."""
        here: Any = self.data
        path: Path = ()
        for position, part in enumerate(parts):
            step = self._step(here, path, part)
            if step is None:
                what, remedy = _dead_end(here, path, part)
                return Problem(place, (*path, part), what, remedy)
            path = (*path, step)
            if position == len(parts) - 1:
                here[step] = value
                for known in [known for known in self.places if known[: len(path)] == path]:
                    del self.places[known]
                self.places[path] = place
            elif (inside := here.get(step) if isinstance(here, dict) else here[step]) is None:
                here[step] = [] if parts[position + 1].isdecimal() else {}
                self.places[path] = place
                here = here[step]
            else:
                here = inside
        return None

    def _step(self, here: Any, path: Path, part: str) -> Part | None:
        """`part` as a key or index into `here` (a list's length appends), or None where it cannot be one."""
        if isinstance(here, dict):
            self._drop_synonyms(here, path, part)
            return part
        if isinstance(here, list) and part.isdecimal() and len(part) <= len(str(MAX_NODES)):
            index = int(part)
            if index == len(here):
                here.append(None)
            return index if index < len(here) else None
        return None

    def _drop_synonyms(self, section: dict[str, Any], path: Path, key: str) -> None:
        """`training.steps=10` takes out a `train_iters` given before: one key, and the last one wins."""
        owner = section_of(type_at(self._schema, path))
        field = field_for(owner, key) if owner else None
        for synonym in keys_of(key, field) if field else ():
            if synonym != key and synonym in section:
                del section[synonym]
                self.places.pop((*path, synonym), None)


def _dead_end(here: Any, path: Path, part: str) -> tuple[str, str]:
    """Why `part` cannot be taken from `here`, and what can."""
    if isinstance(here, list):
        last = len(here)
        return (
            f"{dotted(path)} is a list of {last} and has no position {part!r}",
            f"use a position from 0 to {last}; {last} appends",
        )
    return f"{dotted(path)} is {value_in_words(here)} and has no key {part!r}", "name a key that exists"
