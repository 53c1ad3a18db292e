"""Recipes: which format and scaling each role gets, under an id and a version that never changes meaning.

A recipe is data (a table of `ScalingSpec` by role, and the class of its weights) bound to a backend. A changed
constant is a new version, never a new meaning of an old id. May import: backends, config, errors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from quaver.backends import Backend, Orientation, QuantizationRole, QuantizedOperand, ScalingSpec
from quaver.errors import CapabilityError
from quaver.formats import hif8, mxfp8

if TYPE_CHECKING:
    from quaver.config import LowPrecisionConfig
    from quaver.low_precision.quantized import QuantizedWeightTensor

Role = QuantizationRole


@dataclass(frozen=True)
class RecipeSpec:
    """The constants of one recipe version: pure data."""

    id: str
    format: str
    roles: Mapping[QuantizationRole, ScalingSpec]


def mxfp8_spec(scale_rule: str) -> RecipeSpec:
    """MXFP8: E4M3 with E8M0 per 32, the same for every role (OCP MX 1.0)."""
    scaling = ScalingSpec("mxfp8_e4m3", block=mxfp8.BLOCK, scale_rule=scale_rule)
    return RecipeSpec(f"mxfp8_e4m3/mx_block/{scale_rule}@1", "mxfp8_e4m3", dict.fromkeys(Role, scaling))


def hif8_spec() -> RecipeSpec:
    """HiF8 current scaling: format maximum 15 for inputs and weights, 224 for gradients."""
    forward = ScalingSpec("hif8", format_max=hif8.SCALE_MAX_INPUT)
    gradient = ScalingSpec("hif8", format_max=hif8.SCALE_MAX_GRADIENT)
    roles = {role: gradient if role is Role.GRAD_OUTPUT else forward for role in Role}
    return RecipeSpec("hif8/current@1", "hif8", roles)


RECIPES: dict[str, RecipeSpec] = {
    spec.id: spec for spec in (mxfp8_spec("floor"), mxfp8_spec("rceil"), hif8_spec())
}


@dataclass(frozen=True)
class Quantizer:
    """Quantises for one role; walks no model, runs no collective. A kernel's error goes up as it is, `fqn` noted."""

    spec: ScalingSpec
    role: QuantizationRole
    backend: Backend
    fqn: str | None = None  # whose tensors; None: called by hand, there is nothing to note

    def quantize(
        self,
        tensor: torch.Tensor,
        *,
        orientation: Orientation,
        group_list: torch.Tensor | None = None,
        amax: torch.Tensor | None = None,
    ) -> QuantizedOperand:
        """[M, K] or [E, A, B] in FP32 or BF16 -> one operand; `group_list`: [E] int64 cumulative ends."""
        with self._noted():
            return self.backend.quantize(
                tensor,
                spec=self.spec,
                role=self.role,
                orientation=orientation,
                group_list=group_list,
                amax=amax,
            )

    def quantize_dual(
        self,
        tensor: torch.Tensor,
        *,
        group_list: torch.Tensor | None = None,
        amax: torch.Tensor | None = None,
    ) -> tuple[QuantizedOperand, QuantizedOperand]:
        """(row, col) in one go."""
        with self._noted():
            return self.backend.quantize_dual(
                tensor, spec=self.spec, role=self.role, group_list=group_list, amax=amax
            )

    def quantize_sides(
        self, tensor: torch.Tensor, *, row: bool, col: bool, group_list: torch.Tensor | None = None
    ) -> tuple[QuantizedOperand | None, QuantizedOperand | None]:
        """(row, col), each only where it is wanted."""
        if row and col:
            return self.quantize_dual(tensor, group_list=group_list)
        return (
            self.quantize(tensor, orientation="row", group_list=group_list) if row else None,
            self.quantize(tensor, orientation="col", group_list=group_list) if col else None,
        )

    def column_scales(self, tensor: torch.Tensor, *, row0: int) -> torch.Tensor:
        """uint8 [touched blocks, K]: scales of the `col` blocks that rows from `row0` on touch, from these alone."""
        with self._noted():
            return self.backend.column_scales(tensor, spec=self.spec, role=self.role, row0=row0)

    def quantize_columns(self, tensor: torch.Tensor, scales: torch.Tensor, *, row0: int) -> torch.Tensor:
        """uint8 codes [M, K] of these rows under the scales of the whole blocks."""
        with self._noted():
            return self.backend.quantize_columns(tensor, scales, spec=self.spec, role=self.role, row0=row0)

    @contextmanager
    def _noted(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if self.fqn is not None:
                error.add_note(f"in {self.fqn}, quantising {self.role.value}")
            raise


@dataclass(frozen=True)
class LowPrecisionRecipe:
    """A recipe at work: its constants, the class of its weights, and the backend that computes."""

    spec: RecipeSpec
    weight_class: type[QuantizedWeightTensor]
    backend: Backend

    @property
    def id(self) -> str:
        """Name and version, e.g. "mxfp8_e4m3/mx_block/floor@1"."""
        return self.spec.id

    @property
    def format(self) -> str:
        """Element format."""
        return self.spec.format

    def quantizer(self, role: QuantizationRole, fqn: str | None = None) -> Quantizer:
        """The quantiser of a role; errors note the module or weight `fqn`."""
        return Quantizer(self.spec.roles[role], role, self.backend, fqn)

    def quantize_pair(
        self,
        tensor: torch.Tensor,
        row_role: QuantizationRole,
        col_role: QuantizationRole,
        group_list: torch.Tensor | None = None,
        fqn: str | None = None,
    ) -> tuple[QuantizedOperand, QuantizedOperand]:
        """Row under one role and col under another; one dual call where the two are scaled alike."""
        row, col = self.quantizer(row_role, fqn), self.quantizer(col_role, fqn)
        if row.spec == col.spec:
            return row.quantize_dual(tensor, group_list=group_list)
        return (
            row.quantize(tensor, orientation="row", group_list=group_list),
            col.quantize(tensor, orientation="col", group_list=group_list),
        )


@dataclass(frozen=True)
class LowPrecisionPolicy:
    """What a replacement factory is handed: how to compute, never which modules."""

    config: LowPrecisionConfig
    recipe: LowPrecisionRecipe

    @property
    def backend(self) -> Backend:
        """The one backend of the run."""
        return self.recipe.backend


WeightClasses = Mapping[str, "type[QuantizedWeightTensor]"]
BackendFactory = Callable[["LowPrecisionConfig"], Backend]


def policy_for(
    config: LowPrecisionConfig,
    backend: Backend,
    *,
    recipes: Mapping[str, RecipeSpec] = RECIPES,
    weight_classes: WeightClasses | None = None,
) -> LowPrecisionPolicy:
    """Binds a config to a recipe and a backend.

    Args:
        config: parsed config with `enabled: true`.
        backend: the chosen backend.
        recipes: recipe id -> constants; more formats come in here, explicitly.
        weight_classes: format -> class of its weights; None: the built-in ones.
    """
    if config.recipe_id not in recipes:
        raise CapabilityError(
            f"no recipe {config.recipe_id!r}", where="low_precision", remedy=f"use one of {sorted(recipes)}"
        )
    if weight_classes is None:
        from quaver.low_precision.quantized import WEIGHT_CLASSES

        weight_classes = WEIGHT_CLASSES
    spec = recipes[config.recipe_id]
    return LowPrecisionPolicy(config, LowPrecisionRecipe(spec, weight_classes[spec.format], backend))
