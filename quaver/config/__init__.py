"""The config of a run: schema, YAML loader, overrides, names, help.

Strings only: a config names code, it never brings any. Imports pydantic and PyYAML, no torch.
"""

from __future__ import annotations

from quaver.config.base import Section
from quaver.config.data import DataConfig, SourceConfig
from quaver.config.dump import dump_yaml
from quaver.config.help import help_config
from quaver.config.loader import load_config, parse_config
from quaver.config.low_precision import FormatName, LowPrecisionConfig, ReplacementRule, low_precision_class
from quaver.config.model import ModelConfig
from quaver.config.overrides import Override
from quaver.config.schema import FSDPConfig, GradientCheckpointingConfig, ParallelConfig, RunConfig
from quaver.config.training import CheckpointConfig, OptimizerConfig, ScheduleConfig, TrainingConfig

__all__ = [
    "RunConfig",
    "load_config",
    "parse_config",
    "Override",
    "dump_yaml",
    "help_config",
    "ModelConfig",
    "LowPrecisionConfig",
    "FormatName",
    "low_precision_class",
    "ReplacementRule",
    "FSDPConfig",
    "ParallelConfig",
    "GradientCheckpointingConfig",
    "DataConfig",
    "SourceConfig",
    "TrainingConfig",
    "OptimizerConfig",
    "ScheduleConfig",
    "CheckpointConfig",
    "Section",
]
