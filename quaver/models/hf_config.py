"""Reads a Hugging Face config and lays overrides over it; fetches nothing, runs nothing, ignores no override.

A config is untrusted data: it is read as JSON and mapped to a class of the installed transformers package; code
that it points at (`auto_map`) is never imported, and no network is tried. Nothing here knows one architecture
from another. Imports transformers, the MoE helpers and `quaver.errors`.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from quaver.errors import ConfigError
from quaver.models.moe import check_routing

logger = logging.getLogger(__name__)

# Keys of a config.json that describe how somebody else's weights were stored or run, not the architecture.
_DROPPED = ("auto_map", "quantization_config", "gradient_checkpointing", "compression_config")
# Keys that have a place of their own in a run's config, so an override would be a second truth.
_ELSEWHERE = {
    "torch_dtype": "model.torch_dtype",
    "dtype": "model.torch_dtype",
    "attn_implementation": "model.attn_implementation",
    "model_type": "model.config_name_or_path",
}
_ROPE_LEGACY = ("rope_theta", "rope_scaling")
_POSITIVE = ("hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads")


def load_hf_config(
    config_name_or_path: str | Path, config_overrides: Mapping[str, Any] | None = None
) -> PreTrainedConfig:
    """Read a transformers config and apply overrides, without fetching or running anything.

    Args:
        config_name_or_path: a folder with a config.json, a JSON file, or a transformers model type
            (`deepseek_v3`), whose defaults are then taken.
        config_overrides: fields of the config class, or their aliases, that replace what was read.

    Raises:
        ConfigError: no such file, folder or model type; not a JSON object; an unknown override; a value that
            the config class refuses; a router that could not choose.
    """
    values, source = _read(config_name_or_path)
    overrides = dict(config_overrides or {})
    model_type = values.pop("model_type", None)
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise ConfigError(
            f"transformers has no model type {model_type!r}",
            where=f"model.config_name_or_path: {source}",
            remedy=_close(str(model_type), CONFIG_MAPPING.keys())
            or "give a model type that transformers knows",
        )
    config_class: type[PreTrainedConfig] = CONFIG_MAPPING[model_type]
    for key in (*_DROPPED, *(k for k in values if "_implementation" in k)):
        if values.pop(key, None) is not None:
            logger.warning("%s: %s is not used: Quaver builds the architecture alone", source, key)
    _check_override_names(config_class, overrides)
    merged = _merge(config_class, values, overrides)
    try:
        config = config_class(**merged)
    except Exception as error:  # huggingface_hub's validators derive from Exception itself
        raise ConfigError(
            f"{config_class.__name__} refuses a value: {' '.join(str(error).split())}",
            where=f"model.config_name_or_path: {source}; model.config_overrides: {sorted(overrides)}",
            remedy="correct the value",
        ) from error
    _check_taken(config, overrides)
    check_routing(config)
    return config


def _read(config_name_or_path: str | Path) -> tuple[dict[str, Any], str]:
    """The values of a config.json, or only the model type where a model type was named; and what was read."""
    path = Path(config_name_or_path)
    where = f"model.config_name_or_path: {config_name_or_path}"
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        name = str(config_name_or_path)
        if name in CONFIG_MAPPING:
            return {"model_type": name}, f"model type {name}"
        raise ConfigError(
            "neither a folder with a config.json, nor a JSON file, nor a transformers model type",
            where=where,
            remedy=_close(name, CONFIG_MAPPING.keys())
            or "nothing is fetched: download the model's config.json and give its path",
        )
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"the file cannot be read as JSON: {error}", where=where) from error
    if not isinstance(values, dict):
        raise ConfigError("the file does not hold a JSON object", where=where)
    return values, str(file)


def _check_override_names(config_class: type[PreTrainedConfig], overrides: Mapping[str, Any]) -> None:
    aliases = config_class.attribute_map
    known = {field.name for field in dataclasses.fields(config_class)} | set(aliases) | set(aliases.values())
    if "rope_parameters" in known:
        known |= set(_ROPE_LEGACY)
    for key in overrides:
        where = f"model.config_overrides.{key}"
        if key in _ELSEWHERE:
            raise ConfigError(
                f"{key} has a key of its own", where=where, remedy=f"set {_ELSEWHERE[key]} instead"
            )
        if key not in known:
            raise ConfigError(
                f"{config_class.__name__} has no field {key}",
                where=where,
                remedy=_close(key, known) or f"see the fields of {config_class.__name__}",
            )
    for alias, name in aliases.items():
        if alias in overrides and name in overrides:
            raise ConfigError(
                f"{alias} and {name} are one field",
                where="model.config_overrides",
                remedy="give one of the two",
            )


def _merge(
    config_class: type[PreTrainedConfig], values: dict[str, Any], overrides: dict[str, Any]
) -> dict[str, Any]:
    """What was read, under the overrides; where a field has two names, the override's drops the other."""
    merged = dict(values)
    for alias, name in config_class.attribute_map.items():
        for key, other in ((alias, name), (name, alias)):
            if key in overrides:
                merged.pop(other, None)
    rope = overrides.get("rope_parameters", values.get("rope_parameters"))
    if "rope_parameters" in overrides or "rope_scaling" in overrides:
        for key in ("rope_scaling", "rope_parameters"):
            merged.pop(key, None)
    if "rope_scaling" in overrides and isinstance(rope, dict) and "rope_theta" in rope:
        merged["rope_theta"] = rope["rope_theta"]  # the scaling is replaced, the base stays
    merged.update(overrides)
    if "rope_theta" in overrides and isinstance(rope, dict) and "rope_scaling" not in overrides:
        # transformers prefers the theta inside the dict: the override has to go there.
        merged["rope_parameters"] = {**rope, "rope_theta": merged.pop("rope_theta")}
    return merged


def _check_taken(config: PreTrainedConfig, overrides: Mapping[str, Any]) -> None:
    """Each override stands in the built config: a config class may derive a field and ignore the override."""
    for key, want in overrides.items():
        if key in ("rope_parameters", "rope_scaling"):
            got = want  # normalised by transformers: keys are added and renamed
        elif key == "rope_theta":
            got = (getattr(config, "rope_parameters", None) or {}).get("rope_theta")
        else:
            got = getattr(config, key, None)
        if got != want and not isinstance(got, PreTrainedConfig):
            raise ConfigError(
                f"{type(config).__name__} made {got!r} of it",
                where=f"model.config_overrides.{key}: {want!r}",
                remedy="this field is derived from others: set those",
            )
    for key in _POSITIVE:
        size = getattr(config, key, None)
        if isinstance(size, int) and size < 1:
            raise ConfigError(
                f"{key} must be at least 1, got {size}",
                where=f"model.config_overrides.{key}",
                remedy=f"give {key} a size of 1 or more",
            )


def _close(name: str, known: Iterable[str]) -> str | None:
    found = difflib.get_close_matches(name, list(known), n=3, cutoff=0.6)
    return f"did you mean {' or '.join(found)}?" if found else None
