"""`load_config`: a YAML file, a mapping or a RunConfig, plus overrides, to a checked RunConfig."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quaver.config.describe import value_in_words
from quaver.config.document import MAX_BYTES, Document, parse_yaml
from quaver.config.dump import to_data
from quaver.config.low_precision import FormatName
from quaver.config.overrides import apply_overrides
from quaver.config.schema import RunConfig, run_config_class
from quaver.errors import ConfigError


def load_config(
    config: str | os.PathLike[str] | Mapping[str, Any] | RunConfig,
    overrides: str | Sequence[str] = (),
    *,
    formats: Sequence[FormatName] = (),
) -> RunConfig:
    """Loads and checks a run's config.

    Args:
        config: path of a YAML file, a mapping with the same keys, or a RunConfig.
        overrides: `key.path=value` texts, laid on in order (the last one wins); or one text alone.
        formats: formats beside the built-in ones that `low_precision` may name.

    Raises:
        ConfigError: a file that cannot be read, or anything in it that does not fit; all problems together,
            each with file and line (or number of the override), key and what was wanted.
    """
    if isinstance(config, RunConfig):
        if not overrides:
            return config
        formats = formats or config.low_precision.more_formats
        return _checked(Document(to_data(config, classes=True), "config"), overrides, formats)
    if isinstance(config, Mapping):
        return _checked(Document(to_data(dict(config), classes=True), "config"), overrides, formats)
    if isinstance(config, str | os.PathLike):
        text, source = _read(Path(config)), os.fspath(config)
        return parse_config(text, source=source, overrides=overrides, formats=formats)
    raise ConfigError(f"a config is a path, a mapping or a RunConfig, got {value_in_words(config)}")


def parse_config(
    text: str,
    *,
    source: str = "config",
    overrides: str | Sequence[str] = (),
    formats: Sequence[FormatName] = (),
) -> RunConfig:
    """As `load_config`, from YAML text; `source` names it in messages."""
    document = parse_yaml(text, source)
    if document.data is None:
        raise ConfigError(f"{source}: the config is empty", remedy="start from one of the files in configs/")
    if not isinstance(document.data, dict):
        raise ConfigError(
            f"{source}:1: a config is a mapping of keys, got {value_in_words(document.data)}",
            remedy="write `key: value` lines",
        )
    return _checked(document, overrides, formats)


def _checked(
    document: Document, overrides: str | Sequence[str], formats: Sequence[FormatName]
) -> RunConfig:
    schema = run_config_class(formats)
    document = apply_overrides(document, overrides, schema)
    return schema.from_data(document.data, place=document.place, source=document.source)


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: no such file", remedy="check the path; it is taken from the current folder"
        ) from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: is a folder, wanted a YAML file", remedy="name the file in it") from None
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path}: cannot be read: {error}", remedy="check the path and its permissions"
        ) from None
    if len(content) > MAX_BYTES:
        raise ConfigError(
            f"{path}: larger than {MAX_BYTES} bytes", remedy="a config is small; is this another file?"
        )
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise ConfigError(
            f"{path}:{line}: not UTF-8 (byte 0x{content[error.start]:02x})", remedy="save the file as UTF-8"
        ) from None
