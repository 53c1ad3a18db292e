"""The build order, as a list: from a config to a sharded, quantised model with its optimiser.

    meta -> plan -> install -> (per unit: materialise -> quantise -> shard) -> shard_root
         -> activation_checkpoint -> optimizer

Up to `install` no data is read, no kernel runs and no process group is started or needed. Unit by unit keeps
peak memory at one unit plus the shards and draws the very numbers that Hugging Face's own initialisation draws.
May import: all rooms below.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle

from quaver.assembly.legality import ShardVerdict, require_legal
from quaver.assembly.own_loop import attach
from quaver.assembly.rules import bind_rules
from quaver.assembly.stages import BuildOrder
from quaver.backends import Ledger, PlannedSite
from quaver.checkpoint.hf_import import HFSource, ImportReport
from quaver.checkpoint.hf_load import check_source, load_unit
from quaver.config import RunConfig
from quaver.distributed import PARAMS_BF16, PARAMS_FP32, shard_module
from quaver.errors import ConfigError, PlanError
from quaver.low_precision import (
    FormatExtension,
    LowPrecisionPolicy,
    build_policy,
    low_precision_modules,
    planned_sites,
    quantize_weights,
)
from quaver.models import (
    RouterBias,
    build_on_meta,
    check_spec,
    init_units,
    iter_moe_layers,
    load_hf_config,
    materialise_unit,
)
from quaver.optim import build_adamw
from quaver.surgery import ReplacementPlan, build_replacements, compile_plan, freeze, install

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class Assembly:
    """One model on its way from a config to a training step; each method is one step of the build order."""

    model: nn.Module
    plan: ReplacementPlan | None
    optimizer: torch.optim.AdamW
    router_bias: RouterBias
    attached: RemovableHandle | None

    def __init__(
        self,
        config: RunConfig,
        formats: Sequence[FormatExtension] = (),
        *,
        check_capability: bool = True,
    ) -> None:
        if config.model is None:
            raise ConfigError("the config has no model", where="model", remedy="add a model block")
        self.config, self.model_config = config, config.model
        self.order = BuildOrder()
        self.ledger = Ledger(recipe=config.low_precision.recipe_id if config.low_precision.enabled else None)
        self.policy: LowPrecisionPolicy | None = None
        if config.low_precision.enabled:
            # the capability gate comes before anything is built
            self.policy = build_policy(
                config.low_precision, self.ledger, formats, check_capability=check_capability
            )
        self.plan, self.attached = None, None
        self.frozen: dict[str, list[str]] = {}
        self.replicated_fqns: set[str] = set()  # verdict: cannot be sharded, fallback_to_unsharded
        self.replicated: dict[str, nn.Parameter] = {}
        self.imported: ImportReport | None = None

    # nothing is allocated up to here -----------------------------------------------------------------------

    def build_meta(self) -> None:
        """The Hugging Face model on the meta device, held against its specification."""
        self.order.step("meta")
        spec = self.model_config
        self.hf_config = load_hf_config(spec.config_name_or_path, spec.config_overrides)
        self.model = build_on_meta(self.hf_config, DTYPES[spec.torch_dtype], spec.attn_implementation)
        if spec.spec is not None:
            check_spec(self.model, spec.spec)

    def compile_plan(self) -> None:
        """The replacement plan, from the module tree alone."""
        self.order.step("plan")
        if self.policy is not None:
            if not self.config.plan_overrides:
                raise PlanError(
                    "low precision is enabled, but no module is planned for it",
                    where="plan_overrides",
                    remedy="list the modules to replace, or set low_precision.enabled: false",
                )
            self.plan = compile_plan(self.model, bind_rules(self.config.plan_overrides, self.policy))

    def install(self) -> None:
        """Builds and checks every replacement on meta, installs all or none, and freezes what does not train."""
        self.order.step("install")
        if self.plan is not None:
            install(self.model, build_replacements(self.model, self.plan))
        if self.model_config.freeze:
            self.frozen = freeze(self.model, self.model_config.freeze)
        self.source = None
        if self.model_config.init_from is not None:
            self.source = HFSource(self.model_config.init_from)
            check_source(self.model, self.source)  # headers alone, before anything is allocated
            self._refuse_other_meaning(self.source)
        self.planned = planned_sites(self.model)  # kept from now on: what the ledger is held against
        self.units = dict(init_units(self.model))
        self.order.start_units(list(self.units))

    def _refuse_other_meaning(self, source: HFSource) -> None:
        """Fields that no shape shows (a rope base, a routing scale) must be those of the folder's config."""
        other = source.differences(self.hf_config)
        if other:
            name, (theirs, ours) = next(iter(other.items()))
            raise ConfigError(
                f"the weights were made for another model: {len(other)} config fields differ, first {name}: "
                f"{theirs!r} there, {ours!r} here",
                where=f"model.init_from: {source.folder}",
                remedy="set model.config_name_or_path to that folder, or override the fields to its values",
            )

    def verdicts(self, ranks: int) -> list[ShardVerdict]:
        """Shard legality of every low-precision weight, or PlanError."""
        verdicts = require_legal(self.model, ranks, self.config.fsdp_config)
        self.replicated_fqns = {v.fqn for v in verdicts if v.verdict == "replicated"}
        return verdicts

    # unit by unit ------------------------------------------------------------------------------------------

    def materialise(self, fqn: str, device: torch.device) -> None:
        """Allocates and initialises one unit as Hugging Face does, or gives it its values from files."""
        self.order.unit_step(fqn, "materialise")
        if self.source is not None:
            load_unit(self.model, fqn, self.units[fqn], self.source, device)  # type: ignore[arg-type]
        else:
            materialise_unit(self.model, self.units[fqn], device)

    def quantise(self, fqn: str) -> None:
        """Exact FP32 masters of every float parameter; planned weights become MasterWeights."""
        self.order.unit_step(fqn, "quantise")
        upcast_parameters(self.units[fqn])
        quantize_weights(self.units[fqn], refresh=False)

    def shard(self, fqn: str, mesh: DeviceMesh) -> None:
        """FSDP2 on a layer; its router goes in a unit of its own, which stays in FP32."""
        self.order.unit_step(fqn, "shard")
        kept = self._keep_replicated(fqn)
        if not is_layer(fqn):
            return  # embedding, final norm and head belong to the root's own group
        layer = self.units[fqn]
        reshard = self.config.fsdp_config.reshard_after_forward
        for _, moe in iter_moe_layers(layer):
            shard_module(moe.gate, mesh, reshard_after_forward=reshard, mp_policy=PARAMS_FP32)
        shard_module(layer, mesh, reshard_after_forward=reshard, mp_policy=PARAMS_BF16, replicated=kept)

    def _keep_replicated(self, fqn: str) -> set[nn.Parameter]:
        """The unit's weights that stay whole on every rank, at rest and in every GEMM."""
        kept = {}
        for _, module in low_precision_modules(self.units[fqn]):
            for name in module.WEIGHTS:
                if module.weight_fqn(name) in self.replicated_fqns:
                    kept[module.weight_fqn(name)] = module._parameters[name]
        self.replicated.update(kept)  # type: ignore[arg-type]
        return set(kept.values())  # type: ignore[arg-type]

    # the whole model ---------------------------------------------------------------------------------------

    def shard_root(self, mesh: DeviceMesh) -> None:
        """FSDP2 on the root, which holds what no layer holds."""
        self.order.step("shard_root")
        if self.source is not None:
            self.imported = self.source.finish()  # every key of the files was read, or has a reason
        self.mesh = mesh
        reshard = self.config.fsdp_config.reshard_after_forward
        shard_module(
            self.model,
            mesh,
            reshard_after_forward=reshard,
            mp_policy=PARAMS_BF16,
            replicated=set(self.replicated.values()),
        )
        self.model.train()

    def checkpoint_activations(self) -> None:
        """Recompute of whole layers, inside FSDP's hooks; parameters keep their FQNs."""
        self.order.step("activation_checkpoint")
        if self.config.gradient_checkpointing.activation_checkpoint == "full":
            for fqn, layer in self.units.items():
                if is_layer(fqn):
                    checkpoint_layer(layer)

    def make_optimizer(self) -> None:
        """AdamW on the FP32 masters, the router's bias update, and the refresh after each step."""
        self.order.step("optimizer")
        options = self.config.optimizer
        trainable = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        self.optimizer = build_adamw(
            trainable,
            lr=options.lr,
            betas=options.betas,
            eps=options.eps,
            weight_decay=options.weight_decay,
        )
        self.router_bias = RouterBias(self.model)
        if self.policy is not None:
            self.attached = attach(self.optimizer, self.model)

    def sites(self) -> list[PlannedSite]:
        """What the ledger is held against: the plan as it was installed, not the model as it is by now."""
        return self.planned

    def replacements(self) -> list[dict[str, Any]]:
        """The hit list of every pattern."""
        return self.plan.as_json() if self.plan is not None else []


def plan_on_meta(
    config: RunConfig, formats: Sequence[FormatExtension] = (), *, check_capability: bool = True
) -> Assembly:
    """The part of the build that allocates nothing: structure, plan and checked replacements.

    Args:
        config: the run's config.
        formats: formats beside the built-in ones that the config may name.
        check_capability: False for a plan of a run on another machine.
    """
    assembly = Assembly(config, formats, check_capability=check_capability)
    assembly.build_meta()
    assembly.compile_plan()
    assembly.install()
    return assembly


def assemble(
    config: RunConfig, mesh: DeviceMesh, device: torch.device, formats: Sequence[FormatExtension] = ()
) -> Assembly:
    """The whole build, in its order; the same seed gives the same masters in every format.

    Args:
        config: the run's config.
        mesh: data-parallel mesh.
        device: where the units are materialised.
        formats: formats beside the built-in ones that the config may name.
    """
    assembly = plan_on_meta(config, formats)
    assembly.verdicts(mesh.size(mesh.ndim - 1))
    torch.manual_seed(config.seed)
    for fqn in assembly.units:
        assembly.materialise(fqn, device)
        assembly.quantise(fqn)
        assembly.shard(fqn, mesh)
    assembly.shard_root(mesh)
    assembly.checkpoint_activations()
    assembly.make_optimizer()
    return assembly


def is_layer(fqn: str) -> bool:
    """True for the units that are elements of a list of layers."""
    return fqn.rpartition(".")[2].isdigit()


def upcast_parameters(unit: nn.Module) -> None:
    """Replaces float parameters by their exact FP32 upcast, keeping ties and requires_grad."""
    made: dict[int, nn.Parameter] = {}
    for module in unit.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or not parameter.is_floating_point() or parameter.dtype is torch.float32:
                continue
            if id(parameter) not in made:
                made[id(parameter)] = nn.Parameter(parameter.detach().float(), parameter.requires_grad)
            module._parameters[name] = made[id(parameter)]


def checkpoint_layer(layer: nn.Module) -> None:
    """Recomputes the layer's forward in backward; the module and its parameters' names stay as they are."""
    layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False, early_stop=False)
