"""Which model is built (`model`): a Hugging Face config, what is changed in it, and what does not train."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from quaver.config.base import Many, Section, Text, only
from quaver.config.describe import value_in_words
from quaver.config.names import MODEL_TARGETS, canonical, spellings
from quaver.config.problems import did_you_mean, problem


def _as_target(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    known = canonical(MODEL_TARGETS, value)
    if known is None:
        guess = did_you_mean(value, spellings(MODEL_TARGETS))
        raise problem(
            f"unknown name {value!r}: nothing is imported from a config, its names come from a fixed table",
            remedy=f"{guess + ' ' if guess else ''}known names: {', '.join(spellings(MODEL_TARGETS))}",
        )
    return known


def _plain_data(value: Any, where: str = "") -> Any:
    """A copy of `value` made of mappings, lists, text, numbers, booleans and null; else an error."""
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise problem(f"{where or 'it'} has the key {key!r}, wanted keys that are text")
        return {key: _plain_data(item, f"{where}.{key}".lstrip(".")) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain_data(item, f"{where}.{index}".lstrip(".")) for index, item in enumerate(value)]
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise problem(
        f"{where or 'it'} holds {value_in_words(value)}, wanted plain data (text, numbers, lists, mappings)"
    )


def _as_overrides(value: Any) -> Any:
    return _plain_data(value) if isinstance(value, dict) else value


class ModelConfig(Section):
    """The model that is built, with random weights, from a Hugging Face config."""

    target: Annotated[str | None, BeforeValidator(_as_target)] = Field(
        None,
        validation_alias="_target_",
        description="Builder, a name from a table; null means from_hf_config.",
    )
    config_name_or_path: Text = Field(
        description="Folder, config.json or transformers model type (deepseek_v3); nothing is fetched."
    )
    config_overrides: Annotated[dict[str, Any], BeforeValidator(_as_overrides)] = Field(
        default_factory=dict, description="Keys of the Hugging Face config that are set to other values."
    )
    torch_dtype: Literal["bfloat16", "float32"] = Field(
        "bfloat16", description="Dtype in which the initial weights are drawn; masters are FP32 in any case."
    )
    attn_implementation: Literal["sdpa", "eager"] = Field(
        "sdpa", description="Attention of the transformers model; it always computes in high precision."
    )
    force_hf: Annotated[bool, only(True, "model code other than transformers'", "set force_hf: true")] = (
        Field(True, description="Build transformers' own modules; false is not supported.")
    )
    spec: Literal["deepseek_v3_16b"] | None = Field(
        None, description="Frozen specification that the built model must equal in every count and shape."
    )
    init_from: Text | None = Field(
        None, description="Hugging Face folder whose weights the run starts from; null draws random ones."
    )
    freeze: Many[Text] = Field((), description="FQN patterns of modules or parameters that do not train.")
