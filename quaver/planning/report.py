"""The plan of a run: everything that is known before anything is built, for any number of ranks.

Memory, communication and FLOPs per rank have their keys in the document, empty in this release.
May import: assembly, models, distributed, config, errors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quaver.assembly import Assembly, ShardVerdict, plan_on_meta, refuse_illegal, shard_verdicts
from quaver.config import RunConfig
from quaver.distributed import check_shard_size
from quaver.errors import ConfigError
from quaver.low_precision import low_precision_modules
from quaver.models import parameter_table
from quaver.planning.structure import Node, structure


@dataclass(frozen=True)
class PlanReport:
    """What a config would build.

    Args:
        name: the run's name.
        recipe: recipe id, None with low precision off.
        spec: the frozen specification that the model was held against, None if none was asked for.
        world_size: number of ranks.
        shard_size: ranks that share one copy of the weights; the rest are replicas.
        parameters: elements by category.
        low_precision_parameters: elements of weights whose GEMMs run in eight bits.
        replacements: [{"pattern", "hits": [module FQN]}] in the order of the rules.
        frozen: the same for `model.freeze`, with parameter FQNs.
        verdicts: shard legality of every low-precision weight.
        structure: the module tree, equal neighbours drawn once.
    """

    name: str
    recipe: str | None
    spec: str | None
    world_size: int
    shard_size: int
    parameters: dict[str, int]
    low_precision_parameters: int
    replacements: list[dict[str, Any]]
    frozen: list[dict[str, Any]]
    verdicts: tuple[ShardVerdict, ...]
    structure: Node

    @property
    def total(self) -> int:
        """Elements of all parameters; a shared one counts once."""
        return sum(self.parameters.values())

    def to_json(self) -> dict[str, Any]:
        """As one JSON document; `memory_per_rank`, `communication` and `flops` stay empty in this release."""
        return {
            "name": self.name,
            "recipe": self.recipe,
            "spec": self.spec,
            "world_size": self.world_size,
            "shard_size": self.shard_size,
            "parameters": {"total": self.total, "by_category": self.parameters},
            "low_precision_parameters": self.low_precision_parameters,
            "replacements": self.replacements,
            "frozen": self.frozen,
            "shards": [
                {
                    "fqn": verdict.fqn,
                    "shape": list(verdict.shape),
                    "rows_per_rank": verdict.rows_per_rank,
                    "verdict": verdict.verdict,
                    "reason": verdict.reason,
                }
                for verdict in self.verdicts
            ],
            "memory_per_rank": {},
            "communication": [],
            "flops": {},
            "structure": self.structure.as_json(),
        }

    def refuse_illegal(self) -> None:
        """PlanError if any weight cannot be sharded, as the build itself would raise it."""
        refuse_illegal(self.verdicts, self.shard_size)


def plan(config: RunConfig, world_size: int | None = None) -> PlanReport:
    """Builds the model on meta, compiles and checks the replacement plan, and judges every shard.

    Args:
        config: the run's config.
        world_size: number of ranks; None: `fsdp_config.dp_shard_size`, else 1.

    Raises:
        ConfigError: a model that cannot be built, or ranks that `dp_shard_size` does not divide.
        PlanError: a model that is not its specification, or a plan that does not fit it. Illegal shards do
            not raise: `PlanReport.refuse_illegal` does, once they have been shown.
    """
    world, shards = ranks_of(config, world_size)
    return plan_report(plan_on_meta(config, check_capability=False), world, shards)


def ranks_of(config: RunConfig, world_size: int | None) -> tuple[int, int]:
    """(number of ranks, ranks that share one copy); ConfigError unless the second divides the first."""
    shards = config.fsdp_config.dp_shard_size
    world = world_size if world_size is not None else (shards or 1)
    if world < 1:
        raise ConfigError(f"{world} is no number of ranks", where="--world-size", remedy="give 1 or more")
    return world, check_shard_size(shards, world)


def plan_report(assembly: Assembly, world_size: int, shard_size: int) -> PlanReport:
    """The report on a planned assembly, its replacements installed on meta."""
    config, model = assembly.config, assembly.model
    low = {
        id(p): p.numel()
        for _, module in low_precision_modules(model)
        for p in (module._parameters[name] for name in module.WEIGHTS)
        if p is not None
    }
    return PlanReport(
        name=config.name,
        recipe=assembly.ledger.recipe,
        spec=assembly.model_config.spec,
        world_size=world_size,
        shard_size=shard_size,
        parameters=parameter_table(model),
        low_precision_parameters=sum(low.values()),
        replacements=assembly.replacements(),
        frozen=[{"pattern": pattern, "hits": hits} for pattern, hits in assembly.frozen.items()],
        verdicts=tuple(shard_verdicts(model, shard_size, config.fsdp_config)),
        structure=structure(model),
    )
