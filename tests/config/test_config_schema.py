"""The schema itself: every key described, frozen sections, and what library users do in Python."""

import copy
import pickle
import subprocess
import sys
from collections.abc import Iterator

import pytest
from pydantic import BaseModel, ValidationError

from quaver.config import (
    CheckpointConfig,
    DataConfig,
    FSDPConfig,
    LowPrecisionConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    ReplacementRule,
    RunConfig,
    ScheduleConfig,
    Section,
    SourceConfig,
    TrainingConfig,
    load_config,
)
from quaver.errors import ConfigError


def sections(root: type[BaseModel] = Section) -> Iterator[type[BaseModel]]:
    for child in root.__subclasses__():
        yield child
        yield from sections(child)


@pytest.mark.parametrize("section", sections(), ids=lambda section: section.__name__)
def test_every_field_has_a_one_line_description(section):
    assert section.__doc__
    assert section.model_fields
    for name, field in section.model_fields.items():
        assert field.description, f"{section.__name__}.{name}"
        assert "\n" not in field.description
        assert field.description.endswith(".")


def test_the_public_keys_are_there():
    # the contract's list of keys
    assert list(RunConfig.model_fields) == [
        "name",
        "seed",
        "model",
        "low_precision",
        "plan_overrides",
        "fsdp_config",
        "parallel",
        "gradient_checkpointing",
        "gradient_accumulation_steps",
        "compile",
        "peft",
        "data",
        "training",
        "optimizer",
        "checkpoint",
    ]
    assert list(LowPrecisionConfig.model_fields) == ["enabled", "format", "scaling", "backend", "scale_rule"]
    assert list(ReplacementRule.model_fields) == [
        "match",
        "module_type",
        "replace_module",
        "exact_type",
        "when",
    ]


def test_defaults():
    config = RunConfig()
    assert config.name == "run"
    assert config.model is None
    assert config.plan_overrides == ()
    assert not config.low_precision.enabled
    assert config.data.sources == ()
    assert (config.training.steps, config.training.micro_batch_size, config.training.validate_every) == (
        300,
        8,
        50,
    )
    assert (config.optimizer.lr, config.optimizer.betas, config.optimizer.eps) == (1e-3, (0.9, 0.95), 1e-8)
    assert (config.optimizer.schedule.kind, config.optimizer.schedule.warmup_steps) == ("cosine", None)
    assert load_config({}) == config


def test_sections_are_frozen():
    config = RunConfig()
    with pytest.raises(ValidationError, match="frozen"):
        config.seed = 1  # type: ignore[misc]
    with pytest.raises(ValidationError, match="frozen"):
        config.optimizer.lr = 1.0  # type: ignore[misc]


def test_positional_arguments_follow_the_contract():
    low = LowPrecisionConfig(True, "hif8", "current", "cuda")
    assert (low.enabled, low.format, low.scaling, low.backend) == (True, "hif8", "current", "cuda")
    rule = ReplacementRule("a.b", "torch.nn.Linear", "low_precision_linear", False, "low_precision")
    assert (rule.match, rule.exact_type, rule.when) == (("a.b",), False, "low_precision")
    assert SourceConfig("x", 2).weight == 2.0
    assert ModelConfig("from_hf_config", "deepseek_v3").target == "from_hf_config"
    assert ModelConfig(config_name_or_path="x", target="from_hf_config").target == "from_hf_config"
    assert TrainingConfig(steps=7) == TrainingConfig(7) == TrainingConfig(train_iters=7)
    with pytest.raises(TypeError, match="at most 5 arguments"):
        LowPrecisionConfig(True, "hif8", "current", "cuda", "floor", 1)
    with pytest.raises(TypeError, match="twice"):
        LowPrecisionConfig(True, enabled=True)


@pytest.mark.parametrize(
    ("build", "start"),
    [
        (lambda: LowPrecisionConfig(format="x"), "LowPrecisionConfig: format: not supported: format 'x'"),
        (
            lambda: LowPrecisionConfig(format="hif8"),
            "LowPrecisionConfig: format: format 'hif8' does not go with",
        ),
        (
            lambda: LowPrecisionConfig(enabled=1),
            "LowPrecisionConfig: enabled: wanted true or false, got the number 1",
        ),
        (lambda: LowPrecisionConfig(fromat="hif8"), "LowPrecisionConfig: fromat: unknown key"),
        (
            lambda: LowPrecisionConfig(True, "hif8", "current", "cuda", "floor"),
            "LowPrecisionConfig: scale_rule: ",
        ),
        (
            lambda: RunConfig(optimizer={"schedule": {"kind": 3}}),
            "RunConfig: optimizer.schedule.kind: wanted one of",
        ),
        (lambda: RunConfig(optimizer={"lr": "a"}, seed="b"), "2 errors in RunConfig:"),
        (lambda: ModelConfig(), "ModelConfig: config_name_or_path: required key is missing"),
        (
            lambda: ModelConfig(config_name_or_path="x", target="os.system"),
            "ModelConfig: _target_: unknown name",
        ),
        (
            lambda: ModelConfig(config_name_or_path="x", config_overrides={"a": [object()]}),
            "ModelConfig: config_overrides: a.0 holds an object of type object",
        ),
        (
            lambda: ModelConfig(config_name_or_path="x", config_overrides={1: 2}),
            "ModelConfig: config_overrides: it has the key 1",
        ),
        (
            lambda: ModelConfig(config_name_or_path="x", config_overrides=[1]),
            "ModelConfig: config_overrides: wanted a mapping",
        ),
        (lambda: FSDPConfig(comm_fusion=True), "FSDPConfig: comm_fusion: not supported"),
        (lambda: ParallelConfig(1, 2), "ParallelConfig: cp_size: not supported"),
        (lambda: CheckpointConfig(every=0), "CheckpointConfig: every: wanted a whole number >= 1"),
        (
            lambda: ReplacementRule((), "torch.nn.Linear", "low_precision_linear"),
            "ReplacementRule: match: names no",
        ),
        (
            lambda: ReplacementRule("a", "my.Linear", "low_precision_linear"),
            "ReplacementRule: module_type: unknown",
        ),
        (
            lambda: ReplacementRule("a", 3, "low_precision_linear"),
            "ReplacementRule: module_type: wanted text, got the",
        ),
        (
            lambda: ReplacementRule("a", int, print),
            "ReplacementRule: replace_module: wanted text, got an object",
        ),
        (lambda: DataConfig(sources="a"), "DataConfig: sources: wanted a list"),
        (
            lambda: OptimizerConfig(lr=float("nan")),
            "OptimizerConfig: lr: wanted a finite number >= 0, got the number nan",
        ),
        (
            lambda: ScheduleConfig("wsd", 3, 0.1),
            "ScheduleConfig: warmup_ratio: warmup_steps and warmup_ratio both",
        ),
    ],
)
def test_python_users_get_a_config_error(build, start):
    with pytest.raises(ConfigError) as caught:
        build()
    assert str(caught.value).startswith(start), caught.value
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


def test_an_unknown_string_says_that_python_may_pass_the_class():
    with pytest.raises(ConfigError, match="In Python, pass the class itself"):
        ReplacementRule("a", "my.Linear", "low_precision_linear")


def test_recipe_ids():
    assert LowPrecisionConfig().recipe_id == "mxfp8_e4m3/mx_block/floor@1"
    assert LowPrecisionConfig(scale_rule="rceil").recipe_id == "mxfp8_e4m3/mx_block/rceil@1"
    assert LowPrecisionConfig(format="hif8", scaling="current").recipe_id == "hif8/current@1"


class Custom:
    """A class that no table knows."""


def test_a_rule_keeps_the_class_that_python_gave():
    rule = ReplacementRule("a.*", Custom, "low_precision_linear")
    assert rule.module_type == f"{__name__}.Custom"
    assert rule.module_class is Custom
    assert copy.deepcopy(rule).module_class is Custom
    assert pickle.loads(pickle.dumps(rule)).module_class is Custom
    assert RunConfig(plan_overrides=[rule]).plan_overrides[0].module_class is Custom
    nested = RunConfig(
        plan_overrides=[{"match": "a", "module_type": Custom, "replace_module": "low_precision_linear"}]
    )
    assert nested.plan_overrides[0].module_class is Custom
    by_name = ReplacementRule("a.*", "torch.nn.Linear", "low_precision_linear")
    assert by_name.module_class is None
    assert "Custom" not in repr(by_name)


def test_both_names_of_linear_are_one():
    class Linear:
        pass

    Linear.__module__, Linear.__qualname__ = "torch.nn.modules.linear", "Linear"
    by_class = ReplacementRule("a", Linear, "low_precision_linear")
    by_long_name = ReplacementRule("a", "torch.nn.modules.linear.Linear", "low_precision_linear")
    by_name = ReplacementRule("a", "torch.nn.Linear", "low_precision_linear")
    assert by_class.module_type == by_long_name.module_type == by_name.module_type == "torch.nn.Linear"
    assert by_class == by_name
    assert hash(by_class) == hash(by_name)
    assert by_name != ReplacementRule("b", "torch.nn.Linear", "low_precision_linear")


@pytest.mark.parametrize(
    "given",
    [
        "low_precision_linear",
        {"_target_": "low_precision_linear"},
        {
            "_target_": "hyper_models.components.training.low_precision.modules.linear"
            ".replace_low_precision_linear"
        },
    ],
)
def test_a_replacement_is_stored_under_its_short_name(given):
    assert ReplacementRule("a", Custom, given).replace_module == "low_precision_linear"


def test_config_overrides_are_a_copy():
    overrides = {"rope": {"type": "yarn"}, "layers": (1, 2)}
    model = ModelConfig(config_name_or_path="x", config_overrides=overrides)
    overrides["rope"]["type"] = "changed"
    assert model.config_overrides == {"rope": {"type": "yarn"}, "layers": [1, 2]}


def test_the_room_imports_no_torch():
    code = (
        "import sys, quaver.config as c; c.load_config({}); c.help_config();"
        "bad = {'torch', 'transformers', 'numpy'} & set(sys.modules); assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
