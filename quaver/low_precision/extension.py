"""A format beside the built-in ones: data handed to the config loader and to assembly, registered nowhere.

    loaded = load_config("run.yaml", formats=[e5m2.name])
    assembly = assemble(loaded, mesh, device, formats=[e5m2])        (or quaver.train("run.yaml", formats=[e5m2]))

May import: backends, config, recipe, quantized, errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quaver.backends import BUILTIN_CODECS, Backend, Ledger, QuantizationRole, backend_for
from quaver.errors import PlanError
from quaver.low_precision.quantized import WEIGHT_CLASSES, QuantizedWeightTensor
from quaver.low_precision.recipe import RECIPES, LowPrecisionPolicy, RecipeSpec, policy_for

if TYPE_CHECKING:
    from quaver.backends import Codec
    from quaver.config import FormatName, LowPrecisionConfig


@dataclass(frozen=True)
class FormatExtension:
    """All that a new format consists of.

    Args:
        recipe: its constants by role, under an id with a version, e.g. "e5m2/tensor@1".
        scaling: the value of `low_precision.scaling` that goes with it.
        codec: how the reference backend codes it.
        weight_class: what its quantised weights hold and gather.

    Raises:
        PlanError: a role without a scaling, or a scaling of another format.
    """

    recipe: RecipeSpec
    scaling: str
    codec: Codec
    weight_class: type[QuantizedWeightTensor]

    def __post_init__(self) -> None:
        wrong = [
            role.value
            for role in QuantizationRole
            if role not in self.recipe.roles or self.recipe.roles[role].format != self.recipe.format
        ]
        if wrong:
            raise PlanError(
                f"the recipe {self.recipe.id!r} has no {self.recipe.format} scaling for {', '.join(wrong)}",
                where="FormatExtension.recipe",
                remedy="give each role of QuantizationRole a ScalingSpec of this format",
            )

    @property
    def name(self) -> FormatName:
        """What a config needs to know of it."""
        from quaver.config import FormatName

        return FormatName(self.recipe.format, self.scaling, self.recipe.id)


def _refuse_taken(formats: Sequence[FormatExtension]) -> None:
    """A format that took a built-in one's name or id would change what that means, without a word."""
    names, ids = {*BUILTIN_CODECS, *WEIGHT_CLASSES}, set(RECIPES)
    for more in formats:
        if more.recipe.format in names or more.recipe.id in ids:
            raise PlanError(
                f"the format {more.recipe.format!r} with recipe {more.recipe.id!r} is there already",
                where="formats",
                remedy="give it another name and another recipe id",
            )
        names.add(more.recipe.format)
        ids.add(more.recipe.id)


def build_policy(
    config: LowPrecisionConfig,
    ledger: Ledger,
    formats: Sequence[FormatExtension] = (),
    *,
    check_capability: bool = True,
) -> LowPrecisionPolicy:
    """The policy of a config on its backend, which is checked for the recipe first.

    Args:
        config: with `enabled: true`.
        ledger: where the backend records its GEMMs.
        formats: formats beside the built-in ones.
        check_capability: False for a plan, which computes nothing and needs no device.

    Raises:
        CapabilityError: the backend cannot run the recipe here. PlanError: two formats of one name or recipe id.
    """
    _refuse_taken(formats)
    codecs = {more.recipe.format: more.codec for more in formats}
    backend: Backend = backend_for(config, ledger, codecs=codecs, check=check_capability)
    return policy_for(
        config,
        backend,
        recipes={**RECIPES, **{more.recipe.id: more.recipe for more in formats}},
        weight_classes={**WEIGHT_CLASSES, **{more.recipe.format: more.weight_class for more in formats}},
    )
