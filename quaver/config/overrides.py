"""Dotted overrides: `optimizer.lr=1e-4`, `data.sources.0.path=x`, values in YAML, the last one wins.

They are laid onto the parsed document before it is validated, so that an override meets exactly the checks that a
file meets, with "override 2" where the file's errors have their line.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel

from quaver.config.describe import Part, field_for, keys_of, section_of, type_at, value_in_words
from quaver.config.document import Document, parse_yaml
from quaver.config.problems import Path, Problem, dotted, join_errors


def apply_overrides(document: Document, overrides: Sequence[str], schema: type[BaseModel]) -> Document:
    """The document with each `key.path=value` laid onto it, in order.

    Raises:
        ConfigError: an override without `=` or value, with YAML that cannot be read, or whose path goes through
            something that has no keys.
    """
    if not overrides:
        return document
    data = copy.deepcopy(document.data)
    places = dict(document.places)
    problems: list[Problem] = []
    for number, text in enumerate(overrides, start=1):
        place = f"override {number}"
        key, equals, raw = text.partition("=")
        parts = key.strip().split(".")
        if not equals or not all(parts) or not raw.strip():
            problems.append(
                Problem(
                    place,
                    (),
                    f"{text!r} is no override",
                    "write key.path=value; null, '' and [] are values too",
                )
            )
            continue
        value = parse_yaml(raw, place, place=place).data
        found = _set(data, places, parts, value, place, schema)
        if found is not None:
            problems.append(found)
    if problems:
        raise join_errors(problems, "the overrides")
    return Document(data, document.source, places)


def _set(
    data: dict[str, Any],
    places: dict[Path, str],
    parts: list[str],
    value: Any,
    place: str,
    schema: type[BaseModel],
) -> Problem | None:
    """Puts `value` at the path into `data` (in place), making what is missing on the way; a Problem if it can't."""
    here: Any = data
    path: Path = ()
    for position, part in enumerate(parts):
        last = position == len(parts) - 1
        if isinstance(here, list):
            if not part.isdecimal() or int(part) > len(here):
                what = f"{dotted(path) or 'the config'} is a list of {len(here)}: {part!r} is none of its positions"
                return Problem(place, (*path, part), what, f"use 0 to {len(here)}, where {len(here)} appends")
            step: Part = int(part)
            if step == len(here):
                here.append(None)
        elif isinstance(here, dict):
            step = part
            _drop_synonyms(here, places, path, part, schema)
        else:
            what = f"{dotted(path)} is {value_in_words(here)} and has no key {part!r}"
            return Problem(place, (*path, part), what, "name a key that exists")
        path = (*path, step)
        if last:
            here[step] = value
            for stale in [known for known in places if known[: len(path)] == path]:
                del places[stale]
            places[path] = place
        else:
            inside = here.get(step) if isinstance(here, dict) else here[step]
            if inside is None:
                inside = [] if parts[position + 1].isdecimal() else {}
                here[step] = inside
                places[path] = place
            here = inside
    return None


def _drop_synonyms(
    section: dict[str, Any], places: dict[Path, str], path: Path, key: str, schema: type[BaseModel]
) -> None:
    """`training.steps=10` also takes out a `train_iters` given before: they are one key, and the last one wins."""
    owner = section_of(type_at(schema, path))
    field = field_for(owner, key) if owner else None
    if field is None:
        return
    for synonym in keys_of(key, field):
        if synonym != key and synonym in section:
            del section[synonym]
            places.pop((*path, synonym), None)
