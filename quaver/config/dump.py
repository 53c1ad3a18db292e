"""A config back to YAML, every default written out, so that the file alone re-runs the run."""

from __future__ import annotations

import re
from typing import Any

import yaml

from quaver.config.base import Section
from quaver.config.describe import keys_of
from quaver.config.document import CORE_SCHEMA
from quaver.config.low_precision import ReplacementRule
from quaver.config.names import MODULE_TYPES, canonical
from quaver.config.schema import RunConfig
from quaver.errors import ConfigError


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes all text which YAML 1.1 or 1.2 would read as something else; no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    # YAML 1.1 reads NEL, LS and PS as line breaks; PyYAML escapes them in double quotes alone
    style = '"' if any(char in text for char in "\x85\u2028\u2029") else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)
for _name, _pattern, _first in CORE_SCHEMA:
    _Dumper.add_implicit_resolver(
        "tag:yaml.org,2002:" + _name,
        re.compile(rf"(?:{_pattern})\Z"),
        ["" if char == "\0" else char for char in _first],
    )


def to_data(value: Any, *, classes: bool = False) -> Any:
    """Plain data that validates to an equal config; with `classes`, classes bound to rules stay in it."""
    if isinstance(value, Section):
        unused = value.unused_fields()
        data = {
            keys_of(name, field)[0]: to_data(getattr(value, name), classes=classes)
            for name, field in type(value).model_fields.items()
            if name not in unused
        }
        if classes and isinstance(value, ReplacementRule) and value.module_class is not None:
            data["module_type"] = value.module_class
        return data
    if isinstance(value, list | tuple):
        return [to_data(item, classes=classes) for item in value]
    if isinstance(value, dict):
        return {key: to_data(item, classes=classes) for key, item in value.items()}
    return value


def dump_yaml(config: RunConfig) -> str:
    """YAML text that `parse_config` reads back to an equal config.

    Raises:
        ConfigError: a rule holds a class, given in Python, that no config can name.
    """
    for index, rule in enumerate(config.plan_overrides):
        if canonical(MODULE_TYPES, rule.module_type) is None:
            raise ConfigError(
                f"plan_overrides.{index}.module_type: no config file can name {rule.module_type}",
                remedy=f"use quantize_modules for it; a config can name: {', '.join(MODULE_TYPES)}",
            )
    return yaml.dump(
        to_data(config),
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        default_flow_style=False,
        width=1_000_000,
    )
