"""Dotted overrides: they meet the checks that a file meets, and the last one wins."""

import pytest

from quaver.config import LowPrecisionConfig, Override, ReplacementRule, RunConfig, load_config, parse_config
from quaver.config.document import parse_yaml
from quaver.config.overrides import apply_overrides
from quaver.errors import ConfigError

FILE = """\
name: a
model:
  config_name_or_path: deepseek_v3
  config_overrides:
    num_hidden_layers: 4
training:
  train_iters: 300
data:
  sources:
    - path: first
"""


def load(*overrides: str) -> RunConfig:
    return parse_config(FILE, source="run.yaml", overrides=overrides)


def errors(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*overrides)
    return str(caught.value)


def test_values_are_yaml():
    config = load(
        "optimizer.lr=1e-4",
        "optimizer.betas=[0.8, 0.9]",
        "optimizer.clip_norm=null",
        "optimizer.schedule={kind: wsd, decay_ratio: 0.3}",
        "training.sample_prompts=['def ', \"class \"]",
        "fsdp_config.reshard_after_forward=false",
        "gradient_checkpointing.activation_checkpoint=full",
        "model.config_overrides.num_hidden_layers=2",
        "model.config_overrides.rope_scaling.type=yarn",
        "data.cache_dir=/tmp/a=b",
    )
    assert config.optimizer.lr == 1e-4
    assert config.optimizer.betas == (0.8, 0.9)
    assert config.optimizer.clip_norm is None
    assert (config.optimizer.schedule.kind, config.optimizer.schedule.decay_ratio) == ("wsd", 0.3)
    assert config.training.sample_prompts == ("def ", "class ")
    assert config.fsdp_config.reshard_after_forward is False
    assert config.gradient_checkpointing.activation_checkpoint == "full"
    assert config.model is not None
    assert config.model.config_overrides == {"num_hidden_layers": 2, "rope_scaling": {"type": "yarn"}}
    assert config.data.cache_dir == "/tmp/a=b"
    assert config.name == "a"


def test_positions_in_lists():
    assert [source.path for source in load("data.sources.0.path=x").data.sources] == ["x"]
    assert [source.path for source in load("data.sources.1.path=x").data.sources] == ["first", "x"]
    new = parse_config("name: a", overrides=["data.sources.0.path=x", "data.sources.0.weight=2"]).data.sources
    assert [(source.path, source.weight) for source in new] == [("x", 2.0)]
    assert load("data.sources=[]").data.sources == ()


def test_the_later_override_wins():
    assert load("seed=1", "seed=2").seed == 2
    assert load("optimizer.lr=1", "optimizer={weight_decay: 0}").optimizer.lr == 1e-3
    assert load("optimizer={weight_decay: 0}", "optimizer.lr=1").optimizer.weight_decay == 0


def test_an_override_replaces_the_key_under_its_other_name():
    assert load("training.steps=7").training.steps == 7
    assert load("training.steps=7", "training.train_iters=8").training.steps == 8
    assert load("training.train_iters=9").training.steps == 9


def test_null_takes_out_a_key_that_the_new_choice_does_not_have():
    file = "low_precision: {scale_rule: rceil}\noptimizer: {schedule: {final_ratio: 0.2}}\n"
    config = parse_config(
        file,
        overrides=[
            "low_precision.format=hif8",
            "low_precision.scaling=current",
            "low_precision.scale_rule=null",
            "optimizer.schedule.kind=constant",
            "optimizer.schedule.final_ratio=null",
        ],
    )
    assert config.low_precision.recipe_id == "hif8/current@1"
    assert config.optimizer.schedule.kind == "constant"


@pytest.mark.parametrize(
    ("overrides", "start", "parts"),
    [
        (["seed=1", "optimizer.lr=fast"], "override 2: optimizer.lr: wanted a number", ["the text 'fast'"]),
        (["optimiser.lr=1"], "override 1: optimiser: unknown key", ["did you mean optimizer?"]),
        (["optimizer.lrr=1"], "override 1: optimizer.lrr: unknown key", ["did you mean lr?", "clip_norm"]),
        (["data.sources.0.pth=a"], "override 1: data.sources.0.pth: unknown key", ["did you mean path?"]),
        (["data.sources.5.path=a"], "override 1: data.sources.5: data.sources is a list of 1", ["0 to 1"]),
        (["data.sources.first=a"], "override 1: data.sources.first: data.sources is a list", []),
        (["data.sources." + "9" * 5000 + ".path=a"], "override 1: data.sources.9", ["is a list of 1"]),
        (["name.x=1"], "override 1: name.x: name is the text 'a' and has no key 'x'", []),
        (["parallel.tp_size=2"], "override 1: parallel.tp_size: not supported", []),
        (
            ["low_precision.format=hif8"],
            "override 1: low_precision.format: format 'hif8'",
            ["hif8 + current"],
        ),
        (["optimizer.lr"], "override 1: 'optimizer.lr' is no override", ["key.path=value"]),
        (["optimizer.lr="], "override 1: 'optimizer.lr=' is no override", []),
        (["=3"], "override 1: '=3' is no override", []),
        (["optimizer..lr=3"], "override 1: 'optimizer..lr=3' is no override", []),
        ([".".join("a" * 1000) + "=1"], "override 1: ", ["is no override"]),
        (["optimizer.betas=[1"], "override 1: not valid YAML", []),
        (["optimizer={lr: 1, lr: 2}"], "override 1: lr: duplicate key", []),
        (["name=!!python/object/apply:os.system [x]"], "override 1: the tag", ["runs no code"]),
        (
            ["plan_overrides.0.match=a"],
            "2 errors in run.yaml",
            ["override 1: plan_overrides.0.module_type: required"],
        ),
    ],
)
def test_errors_name_the_override(overrides, start, parts):
    message = errors(*overrides)
    assert message.startswith(start), message
    for part in parts:
        assert part in message, message


def test_errors_in_the_file_keep_their_line_beside_overrides():
    with pytest.raises(ConfigError) as caught:
        parse_config("seed: x\nname: a\n", source="run.yaml", overrides=["optimizer.lr=y"])
    assert "run.yaml:1: seed" in str(caught.value)
    assert "override 1: optimizer.lr" in str(caught.value)


def test_a_replaced_section_is_blamed_on_the_override_and_not_on_its_old_line():
    with pytest.raises(ConfigError, match=r"^override 1: optimizer\.lr: wanted a number"):
        parse_config("optimizer:\n  lr: 1\n", source="run.yaml", overrides=["optimizer={lr: x}"])


def test_the_document_is_left_as_it_was():
    document = parse_yaml(FILE, "run.yaml")
    apply_overrides(document, ["data.sources.0.path=x", "training.steps=7"], RunConfig)
    assert document == parse_yaml(FILE, "run.yaml")


def test_a_mapping_is_a_config_and_is_left_as_it_was():
    given = {"training": {"steps": 3}, "data": {"sources": [{"path": "a"}]}}
    config = load_config(given, ["training.steps=4", "data.sources.0.path=b"])
    assert (config.training.steps, config.data.sources[0].path) == (4, "b")
    assert given == {"training": {"steps": 3}, "data": {"sources": [{"path": "a"}]}}
    with pytest.raises(ConfigError, match=r"^config: trainin: unknown key"):
        load_config({"trainin": {}})
    with pytest.raises(ConfigError, match="Keys should be strings"):
        load_config({1: 2})  # type: ignore[dict-item]


def test_a_run_config_takes_overrides_and_keeps_its_classes():
    class Custom:
        pass

    config = RunConfig(
        low_precision=LowPrecisionConfig(enabled=True),
        plan_overrides=[ReplacementRule("a.*", Custom, "low_precision_linear")],
    )
    assert load_config(config) is config
    changed = load_config(config, ["seed=5"])
    assert changed.seed == 5
    assert changed.low_precision == config.low_precision
    assert changed.plan_overrides == config.plan_overrides
    assert changed.plan_overrides[0].module_class is Custom


@pytest.mark.parametrize("nothing", [None, 3, ["a"]])
def test_what_is_no_config_is_an_error(nothing):
    with pytest.raises(ConfigError, match="a config is a path, a mapping or a RunConfig, got"):
        load_config(nothing)


def test_references_are_told_to_be_quoted():
    """`*.q_proj` is an alias in YAML, and `&x` would be a silent null."""
    for value in ("*.q_proj", "&x", " *a"):
        text = errors(f"name={value}")
        assert "override 1: name: a value that begins with" in text
        assert f"""'name="{value.strip()}"'""" in text
    assert load("""name="a" """).name == "a"
    assert load('model.freeze=["*.embed"]').model.freeze == ("*.embed",)  # type: ignore[union-attr]


def test_one_text_is_one_override():
    assert load_config({"name": "a"}, "training.steps=2").training.steps == 2
    assert load_config(RunConfig(), "training.steps=2").training.steps == 2
    with pytest.raises(ConfigError, match="override 2: wanted the text of an override, got the number 3"):
        load_config(RunConfig(), ["training.steps=2", 3])  # type: ignore[list-item]


def test_an_override_may_have_a_place_of_its_own():
    with pytest.raises(ConfigError, match=r"^--name: name: '\.\./evil' cannot name"):
        load_config(RunConfig(), ["seed=1", Override('name="../evil"', place="--name")])


def test_numbers_are_finite_and_counts_bounded():
    for value in (".inf", "-.inf", ".nan"):
        assert "optimizer.lr: wanted a finite number >= 0, got the number" in errors(f"optimizer.lr={value}")
        assert "optimizer.clip_norm: wanted a finite number > 0 or null" in errors(
            f"optimizer.clip_norm={value}"
        )
    for key in ("training.steps", "data.seq_len", "gradient_accumulation_steps", "checkpoint.every"):
        assert f"{key}: wanted a whole number >= 1 and < 10^9" in errors(f"{key}=1000000000")
    assert load("training.steps=999999999").training.steps == 999_999_999
    assert "training.num_threads: wanted a whole number >= 1 and <= 1024" in errors(
        "training.num_threads=1025"
    )
    assert "training.sample_tokens: wanted a whole number >= 0 and <= 4096" in errors(
        "training.sample_tokens=4097"
    )
