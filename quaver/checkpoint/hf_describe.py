"""The small files of an exported folder, and what in the config must differ from the run's own.

Imports transformers, this room's `hf_tokenizer`.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from quaver.checkpoint.hf_tokenizer import TokenizerDefinition

_MTP = "num_nextn_predict_layers"  # the name that DeepSeek's files, vLLM and SGLang use


def written_config(
    hf_config: PreTrainedConfig,
    model: PreTrainedModel,
    dtype: torch.dtype,
    tokenizer: TokenizerDefinition | None,
) -> tuple[PreTrainedConfig, dict[str, list[Any]]]:
    """The config as it is written, and the fields that differ from the run's."""
    config = copy.deepcopy(hf_config)
    config.architectures = [type(model).__name__]
    config.dtype = dtype
    wanted: dict[str, Any] = {}
    if getattr(config, _MTP, 0):
        wanted[_MTP] = 0  # no such layer is built: an engine would look for its weights
    if tokenizer is not None:
        ends = getattr(config, "eos_token_id", None)
        if tokenizer.eos_id not in (ends if isinstance(ends, list) else [ends]):
            # the ids belong to another tokeniser: token 1 would end a text, or token 0 begin it
            wanted |= {"eos_token_id": tokenizer.eos_id, "bos_token_id": None, "pad_token_id": None}
    changes = {}
    for name, value in wanted.items():
        if getattr(config, name, None) != value:
            changes[name] = [getattr(config, name, None), value]
            setattr(config, name, value)
    return config, changes


def small_files(
    config: PreTrainedConfig, model: PreTrainedModel, tokenizer: TokenizerDefinition | None
) -> dict[str, bytes]:
    """File name -> content of everything but the weights."""
    files = {"config.json": (config.to_json_string(use_diff=True)).encode("utf-8")}
    if model.can_generate():
        generation = GenerationConfig.from_model_config(config)
        files["generation_config.json"] = generation.to_json_string().encode("utf-8")
    if tokenizer is not None:
        files |= tokenizer.files(getattr(config, "max_position_embeddings", None))
    return files


def files_left_out(model: PreTrainedModel, tokenizer: TokenizerDefinition | None) -> dict[str, str]:
    """File -> why there is none."""
    missing = {}
    if tokenizer is None:
        missing["tokenizer.json"] = "no tokenizer was given"
    if not model.can_generate():
        missing["generation_config.json"] = f"{type(model).__name__} does not generate"
    return missing
