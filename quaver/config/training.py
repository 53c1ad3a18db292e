"""How long and how the model is trained: `training`, `optimizer`, `checkpoint`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, Field, Strict, model_validator

from quaver.config.base import MANY, Many, Section, Text, only, supported
from quaver.config.problems import problem


class TrainingConfig(Section):
    """Length of the run, validation, samples and what is done about non-finite steps."""

    steps: int = Field(
        300,
        ge=1,
        lt=MANY,
        validation_alias=AliasChoices("steps", "train_iters"),
        description="Optimiser steps of the run.",
    )
    stop_after: int | None = Field(
        None,
        ge=1,
        lt=MANY,
        description="Stop after this many steps, with the schedule still laid out over `steps`.",
    )
    micro_batch_size: int = Field(8, ge=1, lt=MANY, description="Sequences per rank and micro-step.")
    validate_every: int = Field(
        50, ge=0, lt=MANY, description="Steps between validations; 0 means only at the end."
    )
    validation_batches: int = Field(8, ge=1, lt=MANY, description="Batches per validation.")
    sample_prompts: Many[str] = Field(("def ",), description="Prompts that are continued at each validation.")
    sample_tokens: int = Field(64, ge=0, le=4096, description="Tokens of each sample continuation.")
    verify_recompute: Annotated[
        bool,
        only(False, "verify_recompute", "remove it; a later release verifies recompute tensor by tensor"),
    ] = Field(
        False, description="Compare recomputed tensors with the first forward; not supported in this release."
    )
    nonfinite_limit: int = Field(
        5, ge=1, lt=MANY, description="Skipped non-finite steps in a row that end the run."
    )
    router_bias_update_rate: float = Field(
        0.001,
        ge=0,
        description="Step of the router's load-balancing bias after each optimiser step; 0 is off.",
    )
    tensorboard: bool = Field(False, description="Also write TensorBoard files, from the same metrics.")
    device: Literal["cpu", "cuda", "npu"] | None = Field(
        None, description="Where to train; null is the backend's own device, and the CPU for those that have none."
    )
    num_threads: int | None = Field(
        None, ge=1, le=1024, description="CPU threads of torch; null keeps torch's choice."
    )

    @model_validator(mode="before")
    @classmethod
    def _one_length(cls, data: Any) -> Any:
        if isinstance(data, dict) and "steps" in data and "train_iters" in data:
            raise problem(
                "steps and train_iters are two names of one key, and both are given",
                remedy="keep one of them",
                key="train_iters",
            )
        return data


class ScheduleConfig(Section):
    """How the learning rate goes over the run."""

    null_is_absent = frozenset({"final_ratio", "decay_ratio"})

    kind: Literal["cosine", "linear", "constant", "wsd"] = Field(
        "cosine", description="Shape after the warm-up; wsd is warm-up, stable, decay."
    )
    warmup_steps: int | None = Field(
        None, ge=0, lt=MANY, description="Steps of linear warm-up; excludes warmup_ratio."
    )
    warmup_ratio: float | None = Field(
        None, ge=0, le=1, description="Warm-up as a share of training.steps; excludes warmup_steps."
    )
    final_ratio: float = Field(
        0.1, ge=0, le=1, description="Learning rate at the end as a share of lr; not with constant."
    )
    decay_ratio: float = Field(0.2, gt=0, le=1, description="Share of the steps that decay; wsd only.")

    @model_validator(mode="after")
    def _check(self) -> ScheduleConfig:
        if self.warmup_steps is not None and self.warmup_ratio is not None:
            raise problem(
                "warmup_steps and warmup_ratio both say how long the warm-up is",
                remedy="keep one of them (or set the other to null)",
                key="warmup_ratio",
            )
        for key in sorted(self.unused_fields() & self.model_fields_set):
            raise problem(
                f"{key} means nothing beside kind {self.kind!r}",
                remedy=f"remove {key} (or set it to null)",
                key=key,
            )
        if self.kind == "wsd" and (self.warmup_ratio or 0.0) + self.decay_ratio > 1:
            raise problem("warmup_ratio and decay_ratio add up to more than 1", key="decay_ratio")
        return self

    def unused_fields(self) -> frozenset[str]:
        """`decay_ratio` unless wsd, `final_ratio` with constant: giving them there is an error."""
        unused = set() if self.kind == "wsd" else {"decay_ratio"}
        return frozenset(unused | ({"final_ratio"} if self.kind == "constant" else set()))


_Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(Section):
    """AdamW on the FP32 masters, clipping and the schedule."""

    kind: Annotated[Literal["adamw"], supported("optimizer", "adamw")] = Field(
        "adamw", description="Optimiser; its state is FP32."
    )
    lr: float = Field(1e-3, ge=0, description="Peak learning rate.")
    betas: Annotated[tuple[_Beta, _Beta], Strict(False)] = Field(
        (0.9, 0.95), description="Decay of the first and of the second moment."
    )
    eps: float = Field(1e-8, gt=0, description="Added to the root of the second moment.")
    weight_decay: float = Field(0.1, ge=0, description="Decoupled weight decay.")
    clip_norm: float | None = Field(
        1.0, gt=0, description="Largest global gradient norm; null does not clip."
    )
    schedule: ScheduleConfig = Field(
        default_factory=ScheduleConfig, description="Learning rate over the run."
    )


class CheckpointConfig(Section):
    """Saving, resuming, and starting from another run."""

    format: Annotated[Literal["dcp"], supported("checkpoint format", "dcp")] = Field(
        "dcp", description="Format of checkpoints: torch's distributed checkpoint."
    )
    every: int | None = Field(None, ge=1, lt=MANY, description="Steps between checkpoints; null saves none.")
    keep: int = Field(2, ge=1, lt=MANY, description="Checkpoints kept, the newest ones.")
    asynchronous: bool = Field(False, description="Write checkpoints beside the training.")
    load_from: Text | None = Field(
        None, description="Run or checkpoint, of any recipe, whose masters the run starts from."
    )
    load_optimizer: bool = Field(True, description="With load_from: also the moments and router counts.")
    load_rng: bool = Field(False, description="With load_from: also the random generators.")
