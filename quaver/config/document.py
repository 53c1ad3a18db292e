"""YAML text to plain data, with the line of every key, and nothing else.

PyYAML's parser and composer are used; building the data is ours, because a config needs what SafeLoader does
not give: duplicate keys are errors, `1e-5` is a number and `off` is text (YAML 1.2's core schema), every tag
beyond plain data is refused, and size, depth and the expansion of aliases are bounded. May import PyYAML.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml
from yaml.reader import ReaderError

from quaver.config.problems import Path, Problem, join_errors
from quaver.errors import ConfigError

MAX_BYTES = 1 << 20
MAX_DEPTH = 32
MAX_NODES = 20_000

_TAG = "tag:yaml.org,2002:"
# YAML 1.2 core schema: (tag, pattern, first characters)
CORE_SCHEMA: tuple[tuple[str, str, str], ...] = (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", r"~|null|Null|NULL|", "~nN\0"),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    (
        "float",
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+.0123456789",
    ),
)


@dataclass(frozen=True)
class Document:
    """Plain data and where each part of it was written.

    Attributes:
        data: mappings with text keys, lists, text, numbers, booleans, null.
        source: the file's name, or what stands for it in messages.
        places: path -> 'run.yaml:12' or 'override 2'.
    """

    data: Any
    source: str
    places: Mapping[Path, str] = field(default_factory=dict)

    def place(self, path: Path) -> str:
        """Where `path` was written: its own line, else its closest ancestor's, else the source."""
        for end in range(len(path), 0, -1):
            if path[:end] in self.places:
                return self.places[path[:end]]
        return self.source


class _Loader(yaml.SafeLoader):
    """Composes nodes under bounds; resolves plain scalars by YAML 1.2's core schema."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 (PyYAML's own)

    def __init__(self, text: str, source: str) -> None:
        super().__init__(text)
        self._source = source
        self._depth = 0
        self._count = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._depth += 1
        self._count += 1
        if self._depth > MAX_DEPTH or self._count > MAX_NODES:
            line = self.peek_event().start_mark.line + 1
            raise _too_big(f"{self._source}:{line}", self._depth > MAX_DEPTH)
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1


for _name, _pattern, _first in CORE_SCHEMA:
    _Loader.add_implicit_resolver(
        _TAG + _name, re.compile(rf"(?:{_pattern})\Z"), ["" if char == "\0" else char for char in _first]
    )


def _too_big(place: str, deep: bool) -> ConfigError:
    limit = f"{MAX_NODES} values or {MAX_BYTES} characters"
    what = f"nested deeper than {MAX_DEPTH} levels" if deep else f"more than {limit}, aliases written out"
    return ConfigError(f"{place}: {what}", remedy="a config is small and flat: write out what is meant")


def parse_yaml(text: str, source: str, *, place: str | None = None) -> Document:
    """Parses one YAML document.

    Args:
        text: the YAML.
        source: name of the file, for messages.
        place: what messages say in place of 'source:line' (overrides have no lines).

    Raises:
        ConfigError: not YAML, a duplicate key, a refused tag, a key that is not text, too large or too deep.
    """
    try:
        loader = _Loader(text, source)
        root = loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = place or (f"{source}:{mark.line + 1}" if mark else source)
        reason = " ".join(part for part in (error.context, error.problem) if part)
        raise ConfigError(f"{line}: not valid YAML: {reason}", remedy="correct the YAML") from None
    except ReaderError as error:
        line = place or f"{source}:{text.count(chr(10), 0, error.position) + 1}"
        reason = f"the character U+{int(error.character):04X} may not stand in YAML"
        raise ConfigError(f"{line}: not valid YAML: {reason}", remedy="remove the character") from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        # PyYAML's scanner lets the built-in errors of impossible escapes ("\\UFFFFFFFF") through
        reason = " ".join(str(error).split())
        raise ConfigError(f"{place or source}: not valid YAML: {reason}", remedy="correct the YAML") from None
    if root is None:
        return Document(None, source)
    builder = _Builder(source, place)
    data = builder.build(root, ())
    if builder.problems:
        raise join_errors(builder.problems, source)
    return Document(data, source, builder.places)


class _Builder:
    """Builds plain data from composed nodes, remembering lines and collecting problems."""

    def __init__(self, source: str, place: str | None) -> None:
        self.places: dict[Path, str] = {}
        self.problems: list[Problem] = []
        self._source = source
        self._place = place
        self._count = 0
        self._size = 0

    def _where(self, node: yaml.Node) -> str:
        return self._place or f"{self._source}:{node.start_mark.line + 1}"

    def _wrong(self, node: yaml.Node, path: Path, what: str, remedy: str) -> None:
        self.problems.append(Problem(self._where(node), path, what, remedy))

    def build(self, node: yaml.Node, path: Path) -> Any:
        self._count += 1
        self._size += len(node.value)  # characters of a scalar, entries of a list or mapping
        if len(path) > MAX_DEPTH or self._count > MAX_NODES or self._size > MAX_BYTES:
            raise _too_big(self._where(node), len(path) > MAX_DEPTH)
        kind = node.tag.removeprefix(_TAG)
        if isinstance(node, yaml.MappingNode) and kind == "map":
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode) and kind == "seq":
            return self._sequence(node, path)
        if isinstance(node, yaml.ScalarNode) and kind in ("str", "null", "bool", "int", "float"):
            return self._scalar(node, kind, path)
        shown = "!!" + kind if node.tag.startswith(_TAG) else node.tag
        self._wrong(
            node,
            path,
            f"the tag {shown} is refused",
            "a config is plain data and runs no code: remove the tag",
        )
        return None

    def _mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        data: dict[str, Any] = {}
        lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            key = key_node.value
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag != _TAG + "str":
                shown = key if isinstance(key_node, yaml.ScalarNode) else "(a list or mapping)"
                self._wrong(key_node, path, f"the key {shown} is not text", "put the key in quotes")
                continue
            if key_node.style is None and key == "<<":
                self._wrong(key_node, path, "merge keys (<<) are refused", "write the keys out")
                continue
            here = (*path, key)
            self._scalar(key_node, "str", path)
            if key in data:
                self._wrong(
                    key_node,
                    here,
                    "duplicate key" + ("" if self._place else f": lines {lines[key]} and {line}"),
                    "keep one of the two",
                )
                continue
            lines[key] = line
            self.places[here] = self._where(key_node)
            data[key] = self.build(value_node, here)
        return data

    def _sequence(self, node: yaml.SequenceNode, path: Path) -> list[Any]:
        items = []
        for index, item in enumerate(node.value):
            self.places[(*path, index)] = self._where(item)
            items.append(self.build(item, (*path, index)))
        return items

    def _scalar(self, node: yaml.ScalarNode, kind: str, path: Path) -> Any:
        text: str = node.value
        try:
            if kind == "str":
                text.encode("utf-8")  # an escape such as "\ud800" makes text that no file can hold
                return text
            if kind == "null":
                return None
            if kind == "bool":
                return {"true": True, "false": False}[text.lower()]
            if kind == "int":
                return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
            return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
        except (ValueError, KeyError):
            shown = ascii(text if len(text) <= 40 else text[:37] + "...")
            self._wrong(node, path, f"{shown} is not a valid value of type {kind}", "correct the value")
            return None
