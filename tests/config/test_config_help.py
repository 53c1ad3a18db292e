"""`--help-config` is told from the schema: every key is in it, with its description and its default."""

import re

import pytest
from pydantic import BaseModel

from quaver.config import RunConfig, help_config, parse_config
from quaver.config.describe import field_type, item_type, keys_of, section_of


def leaves(section: type[BaseModel], path: str = ""):
    for name, field in section.model_fields.items():
        for key in keys_of(name, field):
            annotation = field_type(field)
            item = item_type(annotation)
            if (inner := section_of(annotation)) is not None:
                yield from leaves(inner, f"{path}{key}.")
            elif item is not None and (inner := section_of(item)) is not None:
                yield from leaves(inner, f"{path}{key}.N.")
            else:
                yield f"{path}{key}", field


ALL = list(leaves(RunConfig))


def test_there_are_as_many_keys_as_the_contract_names():
    keys = {key for key, _ in ALL}
    assert {
        "name",
        "parallel.tp_size",
        "plan_overrides.N.match",
        "data.sources.N.weight",
        "training.train_iters",
        "optimizer.schedule.warmup_ratio",
        "model._target_",
        "checkpoint.load_rng",
    } <= keys


@pytest.mark.parametrize(("key", "field"), ALL, ids=[key for key, _ in ALL])
def test_every_key_is_in_the_help(key, field):
    text = help_config()
    flat = " ".join(text.split())
    if key == "training.train_iters":
        assert (
            "training.steps (a whole number >= 1 and < 10^9; default 300; also written train_iters)" in flat
        )
    else:
        assert re.search(rf"^  {re.escape(key)}  \(", text, re.M), key
    assert " ".join(field.description.split()) in flat


def test_types_and_defaults_are_those_of_the_schema():
    text = help_config()
    for line in (
        "  name  (text; default run)",
        "  low_precision.format  (one of mxfp8_e4m3, hif8; default mxfp8_e4m3)",
        "  optimizer.lr  (a number >= 0; default 0.001)",
        "  optimizer.clip_norm  (a number > 0 or null; default 1.0)",
        "  optimizer.betas  (a list of 2 (each: a number >= 0 and < 1); default [0.9, 0.95])",
        "  model.config_name_or_path  (text; required)",
        "  fsdp_config.dp_shard_size  (a whole number >= 1 and < 10^9 or null; default null)",
        "  training.tensorboard  (true or false; default false)",
        "  gradient_checkpointing.activation_checkpoint  (one of off, full; default off)",
        "  data.sources  (a list; default [])",
    ):
        assert f"{line}\n" in text, line
    assert max(map(len, text.splitlines())) <= 110
    assert text.isascii()


def test_a_printed_default_is_a_value_that_the_key_takes():
    for key, default in re.findall(r"^  (\S+)  \(.*; default ([^;)]+)", help_config(), re.M):
        if ".N" not in key and not key.startswith("model."):
            parse_config("optimizer: {schedule: {kind: wsd}}", overrides=[f"{key}={default}"])
