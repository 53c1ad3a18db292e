"""What no tensor's shape shows of a model: the fields of its config that decide what the weights mean.

A rope base, a routing scale or an epsilon changes every output and no shape. So a checkpoint keeps these fields, and
whatever takes its weights up is held against them. May import: transformers (types).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

# They say how a model is run, drawn or stored, not what its weights compute.
_HARMLESS = {
    *("architectures", "dtype", "transformers_version", "id2label", "label2id", "problem_type"),
    *("use_cache", "pad_token_id", "bos_token_id", "eos_token_id", "num_nextn_predict_layers", "return_dict"),
    *("initializer_range", "attention_dropout", "pretraining_tp", "chunk_size_feed_forward"),
    *("output_router_logits", "output_attentions", "output_hidden_states", "is_encoder_decoder"),
}


def meaning_of(config: PreTrainedConfig) -> dict[str, Any]:
    """The fields that decide what weights mean, as JSON gives them back."""
    fields = {name: value for name, value in config.to_dict().items() if name not in _HARMLESS}
    found: dict[str, Any] = json.loads(json.dumps(fields, sort_keys=True, default=str))
    return found


def differences(saved: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Fields that differ: name -> (saved, given); None for one that is not there."""
    names = sorted(saved.keys() | given.keys())
    return {
        name: (saved.get(name), given.get(name)) for name in names if saved.get(name) != given.get(name)
    }


def told(found: Mapping[str, tuple[Any, Any]]) -> str:
    """A few words on differences: how many, and the first."""
    name, (saved, given) = next(iter(found.items()))
    count = "1 field differs" if len(found) == 1 else f"{len(found)} fields differ, first"
    return f"{count} {name}: {saved!r} there, {given!r} here"
