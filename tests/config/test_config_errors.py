"""What a config may not hold: each error names place, key, what was given and what to do."""

import pytest

from quaver.config import parse_config
from quaver.errors import ConfigError


def errors(text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config(text, source="run.yaml", overrides=overrides)
    assert caught.value.exit_code == 2
    assert caught.value.__cause__ is None
    return str(caught.value)


def rule(match: str, module_type: str, replace_module: str) -> str:
    lines = [f"match: {match}", f"module_type: {module_type}", f"replace_module: {replace_module}"]
    return "plan_overrides:\n  - " + "\n    ".join(lines) + "\n"


# (YAML, line, key, what must be in the message)
CASES = {
    # unknown keys
    "unknown key": (
        "name: a\noptimizer:\n  beta: [0.9]\n",
        3,
        "optimizer.beta",
        ["unknown key", "did you mean betas?", "clip_norm"],
    ),
    "misspelt section": (
        "trainig: {}\n",
        1,
        "trainig",
        ["unknown key", "did you mean training?", "plan_overrides"],
    ),
    "key of another section": ("steps: 3\n", 1, "steps", ["unknown key", "did you mean training.steps?"]),
    "unknown key in a list": (
        "data:\n  sources:\n    - path: a\n    - path: b\n      weigth: 2\n",
        5,
        "data.sources.1.weigth",
        ["unknown key", "did you mean weight?"],
    ),
    "target without underscores": (
        "model: {config_name_or_path: x, target: y}\n",
        1,
        "model.target",
        ["did you mean _target_?"],
    ),
    # wrong types and ranges
    "text for a number": (
        "optimizer:\n  lr: fast\n",
        2,
        "optimizer.lr",
        ["wanted a number >= 0", "the text 'fast'"],
    ),
    "quoted number": ("optimizer:\n  lr: '3'\n", 2, "optimizer.lr", ["the text '3'", "without quotes"]),
    "number with underscore": ("seed: 1_000\n", 1, "seed", ["wanted a whole number", "the text '1_000'"]),
    "bool for an int": (
        "training:\n  steps: true\n",
        2,
        "training.steps",
        ["wanted a whole number >= 1", "got true"],
    ),
    "bool for a float": ("optimizer:\n  lr: true\n", 2, "optimizer.lr", ["wanted a number", "got true"]),
    "int for a bool": (
        "training:\n  tensorboard: 1\n",
        2,
        "training.tensorboard",
        ["wanted true or false", "the number 1"],
    ),
    "yes for a bool": (
        "training:\n  tensorboard: yes\n",
        2,
        "training.tensorboard",
        ["true or false", "the text 'yes'"],
    ),
    "float for an int": (
        "training:\n  steps: 3.0\n",
        2,
        "training.steps",
        ["a whole number", "the number 3.0"],
    ),
    "number for text": ("name: 7\n", 1, "name", ["wanted text", "the number 7", "quotes"]),
    "text for a section": (
        "optimizer: adamw\n",
        1,
        "optimizer",
        ["wanted a mapping with the keys kind, lr", "the text 'adamw'"],
    ),
    "list for a section": ("training: [3]\n", 1, "training", ["wanted a mapping", "a list of 1"]),
    "null for a section": ("data:\n", 1, "data", ["wanted a mapping", "got null"]),
    "text for a list": (
        "training:\n  sample_prompts: def\n",
        2,
        "training.sample_prompts",
        ["wanted a list", "the text 'def'"],
    ),
    "one beta": ("optimizer:\n  betas: [0.9]\n", 2, "optimizer.betas", ["a list of 2", "a list of 1"]),
    "three betas": (
        "optimizer:\n  betas: [0.9, 0.9, 0.9]\n",
        2,
        "optimizer.betas",
        ["a list of 2", "a list of 3"],
    ),
    "beta of 1": (
        "optimizer:\n  betas:\n    - 0.9\n    - 1\n",
        4,
        "optimizer.betas.1",
        [">= 0 and < 1", "the number 1"],
    ),
    "zero steps": ("training:\n  steps: 0\n", 2, "training.steps", [">= 1", "the number 0"]),
    "infinite rate": ("optimizer:\n  lr: .inf\n", 2, "optimizer.lr", ["wanted a finite number", "inf"]),
    "missing path": (
        "model:\n  spec: deepseek_v3_16b\n",
        1,
        "model.config_name_or_path",
        ["required key is missing"],
    ),
    "unknown spec": (
        "model:\n  config_name_or_path: x\n  spec: v4\n",
        3,
        "model.spec",
        ["deepseek_v3_16b", "'v4'"],
    ),
    "unknown schedule": (
        "optimizer:\n  schedule:\n    kind: cosin\n",
        3,
        "optimizer.schedule.kind",
        ["one of cosine, linear", "did you mean cosine?"],
    ),
    "empty pattern list": (
        rule("[]", "torch.nn.Linear", "low_precision_linear"),
        2,
        "plan_overrides.0.match",
        ["at least one"],
    ),
    "empty path": ("data:\n  sources:\n    - path: ''\n", 3, "data.sources.0.path", ["empty"]),
    "two sources of one name": (
        "data:\n  sources:\n    - {path: a, name: n}\n    - {path: b, name: n}\n",
        2,
        "data.sources",
        ["named 'n'"],
    ),
    "a name that leaves the folder": ("name: ../other\n", 1, "name", ["'../other'", "folder"]),
    "a name with a slash": ("name: a/b\n", 1, "name", ["'a/b'"]),
    # low precision
    "mxfp8 with current": (
        "low_precision:\n  format: mxfp8_e4m3\n  scaling: current\n",
        3,
        "low_precision.scaling",
        ["'mxfp8_e4m3'", "'current'", "mxfp8_e4m3 + mx_block, hif8 + current"],
    ),
    "hif8 with mx_block": (
        "low_precision:\n  scaling: mx_block\n  format: hif8\n",
        2,
        "low_precision.scaling",
        ["'hif8'", "'mx_block'", "mxfp8_e4m3 + mx_block, hif8 + current"],
    ),
    "hif8 with the default scaling": (
        "low_precision:\n  enabled: false\n  format: hif8\n",
        3,
        "low_precision.format",
        ["'mx_block'", "hif8 + current"],
    ),
    "hif8 with delayed": (
        "low_precision:\n  format: hif8\n  scaling: delayed\n",
        3,
        "low_precision.scaling",
        ["not supported", "'delayed'", "mxfp8_e4m3 + mx_block, hif8 + current"],
    ),
    "another format": (
        "low_precision:\n  format: mxfp4\n",
        2,
        "low_precision.format",
        ["not supported", "'mxfp4'", "hif8 + current"],
    ),
    "another backend": (
        "low_precision:\n  backend: tpu\n",
        2,
        "low_precision.backend",
        ["reference, npu, cuda", "'tpu'"],
    ),
    "scale_rule beside hif8": (
        "low_precision:\n  format: hif8\n  scaling: current\n  scale_rule: floor\n",
        4,
        "low_precision.scale_rule",
        ["scale_rule", "'hif8'", "remove scale_rule"],
    ),
    # two names or two values for one thing
    "steps twice": (
        "training:\n  steps: 3\n  train_iters: 3\n",
        3,
        "training.train_iters",
        ["steps and train_iters", "one of them"],
    ),
    "a wrong train_iters": (
        "training:\n  train_iters: x\n",
        2,
        "training.train_iters",
        ["wanted a whole number", "'x'"],
    ),
    "warm-up twice": (
        "optimizer:\n  schedule:\n    warmup_steps: 3\n    warmup_ratio: 0.1\n",
        4,
        "optimizer.schedule.warmup_ratio",
        ["warmup_steps and warmup_ratio"],
    ),
    "decay_ratio without wsd": (
        "optimizer:\n  schedule:\n    decay_ratio: 0.5\n",
        3,
        "optimizer.schedule.decay_ratio",
        ["'cosine'", "remove"],
    ),
    "final_ratio with constant": (
        "optimizer:\n  schedule:\n    kind: constant\n    final_ratio: 0.5\n",
        4,
        "optimizer.schedule.final_ratio",
        ["'constant'"],
    ),
    "wsd longer than the run": (
        "optimizer:\n  schedule: {kind: wsd, warmup_ratio: 0.5, decay_ratio: 0.6}\n",
        2,
        "optimizer.schedule.decay_ratio",
        ["more than 1"],
    ),
    # names of code
    "unknown _target_ of the model": (
        "model:\n  _target_: os.system\n  config_name_or_path: x\n",
        2,
        "model._target_",
        ["'os.system'", "nothing is imported from a config", "from_hf_config"],
    ),
    "unknown _target_ of a replacement": (
        rule("a", "torch.nn.Linear", "\n      _target_: os.system"),
        4,
        "plan_overrides.0.replace_module",
        ["'os.system'", "nothing is imported", "low_precision_linear"],
    ),
    "misspelt replacement": (
        rule("a", "torch.nn.Linear", "low_precison_linear"),
        4,
        "plan_overrides.0.replace_module",
        ["did you mean low_precision_linear?"],
    ),
    "replacement with arguments": (
        rule("a", "torch.nn.Linear", "{_target_: x, bias: 1}"),
        4,
        "plan_overrides.0.replace_module",
        ["the one key _target_", "bias"],
    ),
    "unknown module_type": (
        rule("a", "torch.nn.Linaer", "low_precision_linear"),
        3,
        "plan_overrides.0.module_type",
        ["'torch.nn.Linaer'", "nothing is imported", "did you mean torch.nn.Linear?"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_error_names_line_key_and_remedy(case):
    text, line, key, parts = CASES[case]
    message = errors(text)
    assert message.startswith(f"run.yaml:{line}: {key}: "), message
    for part in parts:
        assert part in message, message


CHECKPOINTING = "gradient_checkpointing.activation_checkpoint"
NOT_SUPPORTED = {
    "parallel: {tp_size: 2}": "parallel.tp_size",
    "parallel: {cp_size: 2}": "parallel.cp_size",
    "parallel: {ep_size: 8}": "parallel.ep_size",
    "parallel: {pp_size: 0}": "parallel.pp_size",
    "compile: true": "compile",
    "peft: {r: 8}": "peft",
    "peft: lora": "peft",
    "checkpoint: {format: safetensors}": "checkpoint.format",
    "fsdp_config: {comm_fusion: true}": "fsdp_config.comm_fusion",
    "model: {config_name_or_path: x, force_hf: false}": "model.force_hf",
    "training: {verify_recompute: true}": "training.verify_recompute",
    "data: {packing: best_fit}": "data.packing",
    "gradient_checkpointing: {activation_checkpoint: selective}": CHECKPOINTING,
    "optimizer: {kind: muon}": "optimizer.kind",
    "low_precision: {format: mxfp4}": "low_precision.format",
    "low_precision: {scaling: delayed}": "low_precision.scaling",
}


@pytest.mark.parametrize("text", NOT_SUPPORTED)
def test_refused_values_are_not_supported_rather_than_unknown(text):
    message = errors(f"name: a\n{text}\n")
    assert message.startswith(f"run.yaml:2: {NOT_SUPPORTED[text]}: not supported: "), message
    assert "remedy: " in message
    assert "unknown key" not in message


@pytest.mark.parametrize("text", NOT_SUPPORTED)
def test_every_refused_key_has_a_value_that_is_accepted(text):
    accepted = {
        "peft": "null",
        "checkpoint.format": "dcp",
        "checkpoint.every": "null",
        "checkpoint.load_from": "null",
        "model.init_from": "null",
        "model.force_hf": "true",
        "data.packing": "concat",
        "optimizer.kind": "adamw",
        "gradient_checkpointing.activation_checkpoint": "full",
        "low_precision.format": "mxfp8_e4m3",
        "low_precision.scaling": "mx_block",
        "parallel.tp_size": "1",
        "parallel.cp_size": "1",
        "parallel.ep_size": "1",
        "parallel.pp_size": "1",
    }
    key = NOT_SUPPORTED[text]
    parse_config("model: {config_name_or_path: x}", overrides=[f"{key}={accepted.get(key, 'false')}"])


def test_comm_fusion_with_low_precision_names_both():
    message = errors("low_precision:\n  enabled: true\nfsdp_config:\n  comm_fusion: true\n")
    assert "run.yaml:4: fsdp_config.comm_fusion: not supported" in message
    assert "low_precision.enabled" in message


def test_all_problems_are_reported_together():
    message = errors("seed: x\noptimizer:\n  lr: y\n  lx: 1\ndata: {packing: z}\n", "training.steps=0")
    for part in (
        "5 errors in run.yaml",
        "run.yaml:1: seed: wanted",
        "run.yaml:3: optimizer.lr: wanted",
        "run.yaml:4: optimizer.lx: unknown key",
        "run.yaml:5: data.packing: not supported",
        "override 1: training.steps: wanted",
    ):
        assert part in message


def test_control_characters_of_a_key_do_not_reach_the_terminal():
    message = errors('"\\e[31mred": 1\n')
    assert "\x1b" not in message
    assert "unknown key" in message
