"""The text of `--help-config`: every key with what it takes, its default and its description.

Told from the schema alone, so that it cannot fall behind it. May import pydantic, PyYAML and this room.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from quaver.config.describe import field_type, in_words, item_type, keys_of, section_of
from quaver.config.schema import RunConfig

_HEAD = """\
Keys of a run's YAML. On the command line `key.path=value` sets the same keys, the last one wins:
  quaver train configs/tiny/mxfp8.yaml optimizer.lr=5e-4 training.steps=100
"""


def help_config() -> str:
    """Plain text, at most 110 columns: the keys of a config, grouped by section."""
    return "\n".join([_HEAD, *_section_lines(RunConfig, ())])


def _section_lines(section: type[BaseModel], path: tuple[str, ...]) -> Iterator[str]:
    """A section's own keys first, then the sections in it."""
    title = (section.__doc__ or "").strip().splitlines()[0]
    yield f"{'.'.join(path)}: {title}" if path else title
    inner = []
    for name, field in section.model_fields.items():
        key, *synonyms = keys_of(name, field)
        holds = _holds(field)
        if holds is not None:
            inner.append((holds[0], (*path, key, *holds[1])))
            if not field.is_required() and not holds[1] and field.default is not None:
                continue  # the section's own keys say it all
        yield from _key_lines(".".join((*path, key)), field, synonyms)
    yield ""
    for child, child_path in inner:
        yield from _section_lines(child, child_path)


def _holds(field: FieldInfo) -> tuple[type[BaseModel], tuple[str, ...]] | None:
    """The section that a field holds, and what its path gets: 'N' for a list of sections."""
    annotation = field_type(field)
    alone = section_of(annotation)
    if alone is not None:
        return alone, ()
    item = item_type(annotation)
    listed = section_of(item) if item is not None else None
    return (listed, ("N",)) if listed is not None else None


def _key_lines(key: str, field: FieldInfo, synonyms: list[str]) -> Iterator[str]:
    default = "required" if field.is_required() else f"default {_yaml(_default(field))}"
    holds = _holds(field)
    takes = in_words(field_type(field)) if holds is None else ("a list" if holds[1] else "a mapping or null")
    also = f"; also written {', '.join(synonyms)}" if synonyms else ""
    yield from textwrap.wrap(
        f"{key}  ({takes}; {default}{also})", 110, initial_indent="  ", subsequent_indent="        "
    )
    yield from textwrap.wrap(
        field.description or "", 110, initial_indent="      ", subsequent_indent="      "
    )


def _default(field: FieldInfo) -> Any:
    value = field.get_default(call_default_factory=True, validated_data={})
    return None if value is PydanticUndefined else value


def _yaml(value: Any) -> str:
    """A default on one line, as it would be written in a config."""
    if isinstance(value, tuple):
        value = list(value)
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000).strip()
    return (
        text.removesuffix("...").strip().strip("'")
        if isinstance(value, str)
        else text.removesuffix("...").strip()
    )
