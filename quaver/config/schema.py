"""`RunConfig`: a whole run in one frozen object. The file to read first.

Every key has its one-line description here or in the section's own file; `--help-config`, the docs and the
error messages are all told from them. A config holds plain data only, and no torch is imported in this room.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from quaver.config.base import MANY, Many, Section, only, supported
from quaver.config.data import DataConfig
from quaver.config.low_precision import FormatName, LowPrecisionConfig, ReplacementRule, low_precision_class
from quaver.config.model import ModelConfig
from quaver.config.problems import not_supported, problem
from quaver.config.training import CheckpointConfig, OptimizerConfig, TrainingConfig

_ONE = "FSDP2 data parallelism is the one kind of parallelism here: set it to 1 or remove it"
_Degree = Annotated[int, only(1, "a parallel size other than 1", _ONE)]


class FSDPConfig(Section):
    """How parameters are sharded over the ranks (PyTorch FSDP2)."""

    dp_shard_size: int | None = Field(
        None, ge=1, lt=MANY, description="Ranks that share one copy of the weights; null means all of them."
    )
    reshard_after_forward: bool = Field(
        True, description="Free gathered weights after forward; gather again later."
    )
    comm_fusion: Annotated[
        bool,
        only(
            False,
            "fused communication, with low_precision.enabled or without",
            "set fsdp_config.comm_fusion: false",
        ),
    ] = Field(False, description="Fuse collectives; true is not supported.")
    reduce_every_micro_step: bool = Field(
        True, description="Reduce gradients over the ranks in each micro-step; false only in the last one."
    )
    fallback_to_unsharded: bool = Field(
        False,
        description="Replicate a weight that cannot be sharded (its GEMMs stay in eight bits), else fail.",
    )
    strict_scale_tiles: bool = Field(
        False, description="Require rows per rank in multiples of 64 rather than exact scales across shards."
    )


class ParallelConfig(Section):
    """Other kinds of parallelism; each size is 1 in this release."""

    tp_size: _Degree = Field(1, description="Tensor parallel size; only 1 is supported.")
    cp_size: _Degree = Field(1, description="Context parallel size; only 1 is supported.")
    ep_size: _Degree = Field(1, description="Expert parallel size; only 1 is supported.")
    pp_size: _Degree = Field(1, description="Pipeline parallel size; only 1 is supported.")


class GradientCheckpointingConfig(Section):
    """Whether layers are recomputed in backward."""

    activation_checkpoint: Annotated[
        Literal["off", "full"], supported("activation_checkpoint", "off", "full")
    ] = Field("off", description="off keeps activations; full recomputes every layer in backward.")


def _check_name(value: str) -> str:
    if not re.fullmatch(r"\w[\w.+-]{0,99}", value):
        raise problem(
            f"{value!r} cannot name a folder under runs/",
            remedy="use letters, digits, '.', '_', '+' and '-', at most 100, the first a letter or digit",
        )
    return value


def _no_peft(value: Any) -> Any:
    if value is not None:
        raise not_supported("peft", remedy="remove the key: adapters and wrapped modules are not replaced")
    return value


class RunConfig(Section):
    """A whole run."""

    name: Annotated[str, AfterValidator(_check_name)] = Field(
        "run", description="Name of the run and its folder."
    )
    seed: int = Field(
        1234, ge=0, lt=2**63, description="Seed of the initial weights and of the data's order."
    )
    model: ModelConfig | None = Field(None, description="The model; needed for everything but library use.")
    low_precision: LowPrecisionConfig = Field(
        default_factory=LowPrecisionConfig, description="Format, scaling and backend of the eight-bit GEMMs."
    )
    plan_overrides: Many[ReplacementRule] = Field((), description="Which modules compute in low precision.")
    fsdp_config: FSDPConfig = Field(default_factory=FSDPConfig, description="Sharding over the ranks.")
    parallel: ParallelConfig = Field(
        default_factory=ParallelConfig, description="Other kinds of parallelism."
    )
    gradient_checkpointing: GradientCheckpointingConfig = Field(
        default_factory=GradientCheckpointingConfig, description="Recompute of activations."
    )
    gradient_accumulation_steps: int = Field(
        1, ge=1, lt=MANY, description="Micro-steps whose gradients make one step."
    )
    compile: Annotated[bool, only(False, "torch.compile", "set compile: false or remove it")] = Field(
        False, description="torch.compile; true is not supported."
    )
    peft: Annotated[None, BeforeValidator(_no_peft)] = Field(None, description="Adapters; not supported.")
    data: DataConfig = Field(default_factory=DataConfig, description="Text, tokeniser and sequences.")
    training: TrainingConfig = Field(
        default_factory=TrainingConfig, description="Length, validation, samples."
    )
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig, description="Optimiser and schedule.")
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig, description="Saving and loading.")


def run_config_class(formats: Sequence[FormatName]) -> type[RunConfig]:
    """`RunConfig` whose `low_precision` knows more formats; see `low_precision_class`."""
    if not formats:
        return RunConfig
    section = low_precision_class(formats)

    class Extended(RunConfig):
        low_precision: section = Field(  # type: ignore[valid-type]
            default_factory=section, description=RunConfig.model_fields["low_precision"].description
        )

    Extended.__name__ = RunConfig.__name__
    Extended.__doc__ = RunConfig.__doc__
    return Extended
