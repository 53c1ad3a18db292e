"""A dumped config loads to an equal one; any text at all gives a config or a ConfigError."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from quaver.config import LowPrecisionConfig, ReplacementRule, RunConfig, dump_yaml, load_config, parse_config
from quaver.errors import ConfigError

CONFIGS = sorted((Path(__file__).parents[2] / "configs").rglob("*.yaml"))

texts = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12).filter(str.strip) | st.sampled_from(
    [
        "off",
        "null",
        "1e-5",
        "0o17",
        "1_000",
        "true",
        "~",
        "- a",
        "a: b",
        "#",
        "é\n b",
        "a\x85b",
        "many  words " * 30,
        "  x ",
        "<<",
        "=",
    ]
)
plain_data = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
positive = st.floats(1e-30, 1e30)
low_precision = st.one_of(
    st.fixed_dictionaries(
        {"enabled": st.booleans()}, optional={"scale_rule": st.sampled_from(["floor", "rceil"])}
    ),
    st.just({"enabled": True, "format": "hif8", "scaling": "current"}),
)
schedules = st.one_of(
    st.fixed_dictionaries({"kind": st.just("wsd"), "decay_ratio": st.floats(0.1, 1.0)}),
    st.fixed_dictionaries({"kind": st.just("constant"), "warmup_steps": st.none() | st.integers(0, 9)}),
    st.fixed_dictionaries({"kind": st.sampled_from(["cosine", "linear"]), "warmup_ratio": st.floats(0, 1)}),
)
rules = st.fixed_dictionaries(
    {
        "match": texts | st.lists(texts, min_size=1, max_size=3),
        "module_type": st.just("torch.nn.Linear"),
        "replace_module": st.sampled_from(["low_precision_linear", "deepseek_v3_low_precision_experts"]),
        "exact_type": st.booleans(),
    }
)
runs = st.fixed_dictionaries(
    {"low_precision": low_precision},
    optional={
        "name": st.from_regex(r"\A\w[\w.+-]{0,9}\Z"),
        "seed": st.integers(0, 2**63 - 1),
        "model": st.none()
        | st.fixed_dictionaries(
            {"config_name_or_path": texts}, optional={"config_overrides": st.dictionaries(texts, plain_data)}
        ),
        "plan_overrides": st.lists(rules, max_size=2),
        "data": st.fixed_dictionaries(
            {"sources": st.lists(st.fixed_dictionaries({"path": texts, "weight": positive}), max_size=2)}
        ),
        "training": st.fixed_dictionaries(
            {"sample_prompts": st.lists(st.text(st.characters(codec="utf-8")))}
        ),
        "optimizer": st.fixed_dictionaries({"lr": positive, "schedule": schedules}),
    },
)


@settings(max_examples=60, deadline=None)
@given(runs)
def test_a_dumped_config_loads_to_an_equal_one(data: dict[str, Any]):
    config = load_config(data)
    assert parse_config(dump_yaml(config)) == config


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: "-".join(path.parts[-2:]))
def test_every_config_of_the_project_loads_and_survives_a_dump(path):
    config = load_config(path)
    assert parse_config(dump_yaml(config)) == config


def test_a_dump_writes_every_default_out():
    written = yaml.safe_load(dump_yaml(RunConfig()))
    assert set(written) == set(RunConfig.model_fields)
    assert written["training"]["steps"] == 300
    assert written["optimizer"]["schedule"]["final_ratio"] == 0.1
    assert written["data"]["sources"] == []
    assert written["low_precision"]["scale_rule"] == "floor"


def test_a_dump_says_the_same_to_yaml_1_1_readers():
    config = parse_config("gradient_checkpointing: {activation_checkpoint: off}\noptimizer: {lr: 1e-5}\n")
    written = yaml.safe_load(dump_yaml(config))
    assert written["gradient_checkpointing"]["activation_checkpoint"] == "off"
    assert written["optimizer"]["lr"] == 1e-5


def test_keys_that_would_be_errors_are_not_written():
    config = RunConfig(low_precision=LowPrecisionConfig(True, "hif8", "current"))
    written = yaml.safe_load(dump_yaml(config))
    assert "scale_rule" not in written["low_precision"]
    assert "decay_ratio" not in written["optimizer"]["schedule"]


@pytest.mark.parametrize(
    "text", ["a\x85b", "a\u2028b", "a\u2029b", "a\nb", "a\tb", "\ufeffa", "\x1b[31m", "低精度", "😀"]
)
def test_unusual_text_survives_a_dump(text):
    config = load_config({"training": {"sample_prompts": [text]}})
    written = dump_yaml(config)
    assert parse_config(written) == config
    assert yaml.safe_load(written)["training"]["sample_prompts"] == [text]


def test_infinities_in_config_overrides_survive():
    config = load_config(
        {"model": {"config_name_or_path": "x", "config_overrides": {"limit": [0.0, math.inf]}}}
    )
    assert parse_config(dump_yaml(config)) == config


def test_a_class_that_no_config_can_name_is_not_dumped_as_if_it_could():
    config = RunConfig(plan_overrides=[ReplacementRule("a", LowPrecisionConfig, "low_precision_linear")])
    with pytest.raises(
        ConfigError, match=r"plan_overrides\.0\.module_type: no config file can name quaver\.config"
    ):
        dump_yaml(config)


def told(load: Callable[[], RunConfig]) -> str | None:
    try:
        load()
    except ConfigError as error:
        return str(error)
    return None


yaml_like = st.text(st.sampled_from("abtx01.-+:,[]{}&*!|>'\"#%@`?= \n\t~\\U<e\x85é\x00"), max_size=40)


@settings(max_examples=200, deadline=None)
@given(yaml_like)
@example("? |\n")
@example("{? : }")
@example("!<x> a: 1")
@example("!!str : 1")
@example("a: !!str")
@example("a: !!map [1]")
@example("a: !!seq {b: 1}")
@example("a: !!int {b: 1}")
@example("a: !!null x")
def test_any_text_is_a_config_or_a_config_error(text: str):
    message = told(lambda: parse_config(text, source="run.yaml"))
    assert message is None or "run.yaml" in message


@settings(max_examples=100, deadline=None)
@given(st.text(st.sampled_from(list("namesdtrig._0123=[]{}:,' ")), max_size=20))
def test_any_override_is_taken_or_a_config_error(text: str):
    message = told(lambda: load_config({}, [text]))
    assert message is None or "override 1" in message
