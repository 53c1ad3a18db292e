"""The schema in words: which keys a section has, and what each of them takes.

Error messages ("wanted a whole number >= 1") and `--help-config` are both told from here, so that they cannot
disagree with the schema. May import pydantic and the standard library.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import AliasChoices, BaseModel
from pydantic.fields import FieldInfo

Part = str | int

_WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    type(None): "null",
    Any: "any value",
}


def keys_of(name: str, field: FieldInfo) -> tuple[str, ...]:
    """The keys by which a config may give this field: the first is the one that is written back."""
    alias = field.validation_alias
    if isinstance(alias, AliasChoices):
        return tuple(str(choice) for choice in alias.choices)
    return (alias,) if isinstance(alias, str) else (name,)


def legal_keys(section: type[BaseModel]) -> list[str]:
    """All keys of a section, synonyms included, in reading order."""
    return [key for name, field in section.model_fields.items() for key in keys_of(name, field)]


def field_for(section: type[BaseModel], key: Part) -> FieldInfo | None:
    """The field that `key` gives in `section`, or None for an unknown key."""
    for name, field in section.model_fields.items():
        if key in keys_of(name, field):
            return field
    return None


def field_type(field: FieldInfo) -> Any:
    """The field's annotation with its constraints put back on it."""
    return Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation


def bare(annotation: Any) -> tuple[Any, tuple[Any, ...]]:
    """An annotation without `Annotated`, and the metadata it carried."""
    metadata: tuple[Any, ...] = ()
    while get_origin(annotation) is Annotated:
        annotation, *more = get_args(annotation)
        for one in more:  # `Annotated[float, Field(ge=0)]` keeps its limits inside the Field
            metadata += tuple(one.metadata) if isinstance(one, FieldInfo) else (one,)
    return annotation, metadata


def members(annotation: Any) -> tuple[Any, ...]:
    """The alternatives of a union; a single one for anything else."""
    plain = bare(annotation)[0]
    return get_args(plain) if get_origin(plain) in (Union, types.UnionType) else (plain,)


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The section that a field holds (alone or as `Section | None`), else None."""
    for member in members(annotation):
        plain = bare(member)[0]
        if isinstance(plain, type) and issubclass(plain, BaseModel):
            return plain
    return None


def item_type(annotation: Any, index: int = 0) -> Any | None:
    """What element `index` of a list-valued field holds; None where the field is no list."""
    for member in members(annotation):
        plain = bare(member)[0]
        if get_origin(plain) is tuple:
            arguments = get_args(plain)
            if len(arguments) == 2 and arguments[1] is Ellipsis:
                return arguments[0]
            return arguments[index] if index < len(arguments) else None
    return None


def type_at(root: Any, path: Sequence[Part]) -> Any | None:
    """The annotation that stands at `path` below `root`; None where the schema has no such place."""
    current: Any = root
    for part in path:
        section = section_of(current)
        if section is not None:
            field = field_for(section, part)
            if field is None:
                return None
            current = field_type(field)
        else:
            current = item_type(current, part) if isinstance(part, int) else None
            if current is None:
                return None
    return current


def all_keys(section: type[BaseModel], path: tuple[Part, ...] = ()) -> Iterator[tuple[Part, ...]]:
    """The path of every key in `section` and in the sections below it; lists of sections are left out."""
    for name, field in section.model_fields.items():
        for key in keys_of(name, field):
            yield (*path, key)
            inner = section_of(field_type(field))
            if inner is not None:
                yield from all_keys(inner, (*path, key))


def in_words(annotation: Any) -> str:
    """What a field takes: 'a whole number >= 1 or null', 'one of off, full', 'a list (each: text)'."""
    plain, metadata = bare(annotation)
    alternatives = members(plain)
    if len(alternatives) > 1:
        return " or ".join(
            in_words(Annotated[(one, *metadata)] if metadata and one is not type(None) else one)
            for one in alternatives
        )
    return _base_words(plain) + _limits(metadata)


def _base_words(plain: Any) -> str:
    origin = get_origin(plain)
    if plain is None:
        return "null"
    if origin is Literal:
        values = [str(value) for value in get_args(plain)]
        return values[0] if len(values) == 1 else "one of " + ", ".join(values)
    if origin is tuple:
        arguments = get_args(plain)
        size = "" if arguments[-1] is Ellipsis else f"of {len(arguments)} "
        return f"a list {size}(each: {in_words(arguments[0])})"
    if origin is dict or plain is dict:
        return "a mapping of keys to values"
    if isinstance(plain, type) and issubclass(plain, BaseModel):
        return "a mapping with the keys " + ", ".join(legal_keys(plain))
    return _WORDS[plain]


def _limits(metadata: Sequence[Any]) -> str:
    words = []
    for limit in metadata:
        if isinstance(limit, annotated_types.Ge):
            words.append(f">= {limit.ge}")
        elif isinstance(limit, annotated_types.Gt):
            words.append(f"> {limit.gt}")
        elif isinstance(limit, annotated_types.Le):
            words.append(f"<= {limit.le}")
        elif isinstance(limit, annotated_types.Lt):
            words.append(f"< {_size(limit.lt)}")
        elif isinstance(limit, annotated_types.MinLen):
            words.append(f"of length >= {limit.min_length}")
    return (" " + " and ".join(words)) if words else ""


def _size(limit: Any) -> str:
    """A limit as one reads it: 10^9 rather than nine noughts."""
    text = str(limit)
    return f"10^{len(text) - 1}" if len(text) > 6 and text == "1" + "0" * (len(text) - 1) else text


def value_in_words(value: Any) -> str:
    """What was given, short enough for one line: "the text 'abc'", 'the number 3', 'a list'."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f"the text {_short(repr(value))}"
    if isinstance(value, int | float):
        return f"the number {_short(repr(value))}"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, type):
        return f"the class {value.__module__}.{value.__qualname__}"
    return f"an object of type {type(value).__name__}"


def _short(text: str, limit: int = 60) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."
