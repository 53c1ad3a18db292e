"""In flight: `QuantizedWeightTensor`, the eight-bit weight that GEMMs see and FSDP's gather returns.

Logically BF16, physically a few uint8 (and FP32 scale) tensors derived from an FP32 master. Its classes hold
what differs between formats: which physical tensors there are, which of them a phase needs, and which of them
make the operand of an orientation. Autograd saves the wrapper; a gather swaps the physical tensors in place.
May import: backends, recipe, distributed, errors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from quaver.backends import OperandError, Orientation, QuantizationRole, QuantizedOperand
from quaver.distributed import FSDPGatherContext, GatherError
from quaver.errors import StaleWeightError
from quaver.formats import mxfp8
from quaver.low_precision.recipe import LowPrecisionRecipe
from quaver.low_precision.shard import Shard

aten = torch.ops.aten
Physical = dict[str, torch.Tensor]


@dataclass(frozen=True)
class WeightSpec:
    """What never changes of one weight: its name, whether a dense or a grouped GEMM reads it, its recipe."""

    fqn: str
    kind: Literal["dense", "grouped"]
    recipe: LowPrecisionRecipe


@dataclass
class FlightState:
    """What all aliases of a weight in flight share, beside its physical tensors."""

    version: int = 0
    moved_on: Callable[[], bool] | None = (
        None  # of a gathered copy: has its shard's master been written since?
    )
    dtype: torch.dtype = torch.bfloat16  # logical: of the gradient that FSDP reduces with its unit's


class QuantizedWeightTensor(torch.Tensor):
    """Base of the eight-bit weights; logical BF16, shape as stored ([N, K], or [E, N, K] grouped).

    `physical` is one dict that all aliases of a weight share; `version` counts refreshes.
    """

    FIELDS: ClassVar[tuple[str, ...]] = ()
    BYTES: ClassVar[float]  # an element of the weight, scales of blocks included

    physical: Physical
    spec: WeightSpec
    flight: FlightState

    @staticmethod
    def __new__(
        cls: type[QuantizedWeightTensor],
        physical: Physical,
        shape: Iterable[int],
        spec: WeightSpec,
        flight: FlightState | None = None,
        requires_grad: bool = False,
    ) -> QuantizedWeightTensor:
        """A wrapper without storage of its own."""
        device = next(iter(physical.values())).device
        return torch.Tensor._make_wrapper_subclass(
            cls,
            torch.Size(shape),
            dtype=flight.dtype if flight is not None else torch.bfloat16,
            device=device,
            requires_grad=requires_grad,
        )

    def __init__(
        self,
        physical: Physical,
        shape: Iterable[int],
        spec: WeightSpec,
        flight: FlightState | None = None,
        requires_grad: bool = False,
    ) -> None:
        self.physical = physical
        self.spec = spec
        self.flight = flight if flight is not None else FlightState()

    @property
    def version(self) -> int:
        """Refresh count of the codes that are held now."""
        return self.flight.version

    # what a format defines ---------------------------------------------------------------------------------

    @classmethod
    def quantize_master(cls, master: torch.Tensor, spec: WeightSpec, shard: Shard | None = None) -> Physical:
        """Physical tensors of an FP32 master; one call of the backend with a weight role."""
        raise TypeError(f"{cls.__name__} is a base: quantise through one of its formats")

    @classmethod
    def gather_fields(
        cls, spec: WeightSpec, context: FSDPGatherContext, shard: Shard | None = None
    ) -> tuple[str, ...]:
        """Names of the physical tensors that a phase needs."""
        raise TypeError(f"{cls.__name__} is a base: gather through one of its formats")

    @classmethod
    def operand(cls, physical: Physical, spec: WeightSpec, orientation: Orientation) -> QuantizedOperand:
        """The operand of an orientation, as views."""
        raise TypeError(f"{cls.__name__} is a base: select through one of its formats")

    @classmethod
    def fold_gathered(cls, fields: Physical, spec: WeightSpec, local: Physical) -> Physical:
        """Physical tensors of the whole weight from gathered ones and the shard's own."""
        return fields

    # what all share ----------------------------------------------------------------------------------------

    @classmethod
    def from_master(cls, master: torch.Tensor, spec: WeightSpec) -> QuantizedWeightTensor:
        """A weight quantised from an FP32 master of the same shape."""
        return spec.recipe.weight_class(
            spec.recipe.weight_class.quantize_master(check_master(master, spec.fqn), spec), master.shape, spec
        )

    def select(self, orientation: Orientation) -> QuantizedOperand:  # type: ignore[override]
        """The operand of an orientation; StaleWeightError if this phase's gather left it out, or is outdated."""
        if self.flight.moved_on is not None and self.flight.moved_on():
            raise StaleWeightError(
                "a gathered copy of the quantised weight is older than its master",
                where=self.spec.fqn,
                remedy="call quaver.attach(optimizer, model) so that each step refreshes it and frees such copies, or "
                "quaver.refresh(model) after writing it yourself",
            )
        return self.operand(self.physical, self.spec, orientation)

    def refresh_from_master(self, master_shard: torch.Tensor) -> None:
        """Derives the codes anew from the FP32 master; never from a dequantised or BF16 copy."""
        master = check_master(master_shard, self.spec.fqn)
        if master.shape != self.shape:
            raise OperandError(
                f"master is {tuple(master.shape)}, the weight {tuple(self.shape)}", where=self.spec.fqn
            )
        fresh = self.quantize_master(master, self.spec)
        self.physical.clear()
        self.physical.update(fresh)
        self.flight.version += 1

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self.spec.fqn!r}, {tuple(self.shape)}, holds {list(self.physical)})"

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        for field, tensor in self.physical.items():  # torch reads physical tensors as attributes
            self.__dict__[field] = tensor
        return list(self.physical), (self.spec, tuple(self.shape), self.flight)

    @classmethod
    def __tensor_unflatten__(
        cls, inner: Physical, meta: Any, outer_size: Any, outer_stride: Any
    ) -> QuantizedWeightTensor:
        spec, shape, flight = meta
        return cls(inner, shape, spec, flight)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        this = args[0]
        if func in (aten.detach.default, aten.alias.default):
            return cls(this.physical, this.shape, this.spec, this.flight)
        if func is aten.as_strided.default and tuple(args[1]) == tuple(this.shape):
            return cls(this.physical, this.shape, this.spec, this.flight)
        if func is aten.zeros_like.default:  # FSDP reduces a zero gradient for a weight that was not used
            return torch.zeros(this.shape, dtype=kwargs.get("dtype") or this.dtype, device=this.device)
        spec = next((a.spec for a in args if isinstance(a, QuantizedWeightTensor)), None)
        raise OperandError(
            f"{func} on a quantised weight: its codes are no numbers to compute with",
            where=spec.fqn if spec else cls.__name__,
            remedy="run it through the low-precision module, or take the FP32 master from state_dict()",
        )


class MXFP8Tensor(QuantizedWeightTensor):
    """Codes and E8M0 scales along both axes: row_data, row_scale, col_data, col_scale.

    Row and col are named as the GEMM sees the weight: [N, K] dense; [E, K, N] grouped, though it is stored
    [E, N, K]. So the forward pass takes `row` dense and `col` grouped, both contracting K.
    """

    FIELDS = ("row_data", "row_scale", "col_data", "col_scale")
    BYTES = 2 * (1 + 1 / mxfp8.BLOCK)

    @classmethod
    def quantize_master(cls, master: torch.Tensor, spec: WeightSpec, shard: Shard | None = None) -> Physical:
        """Both directions in one call; where shards cut column blocks, those take the whole blocks' scales.

        Then `col_scale` holds all blocks of the whole weight and stays replicated: only codes are gathered.
        """
        if shard is not None and shard.cuts_blocks and spec.kind == "dense":
            return cls._quantize_cut(master, spec, shard)
        last, before = spec.recipe.quantizer(QuantizationRole.WEIGHT_FWD, spec.fqn).quantize_dual(master)
        row, col = (last, before) if spec.kind == "dense" else (before, last)
        return {"row_data": row.data, "row_scale": row.scale, "col_data": col.data, "col_scale": col.scale}

    @classmethod
    def _quantize_cut(cls, master: torch.Tensor, spec: WeightSpec, shard: Shard) -> Physical:
        row = spec.recipe.quantizer(QuantizationRole.WEIGHT_FWD, spec.fqn).quantize(master, orientation="row")
        columns = spec.recipe.quantizer(QuantizationRole.WEIGHT_BWD, spec.fqn)
        first = shard.row0 // mxfp8.BLOCK
        touched = columns.column_scales(master, row0=shard.row0)
        scales = touched.new_zeros((-(-shard.total // mxfp8.BLOCK), master.shape[1]))
        scales[first : first + touched.shape[0]] = touched
        shard.maximum(scales)
        codes = columns.quantize_columns(master, scales[first : first + touched.shape[0]], row0=shard.row0)
        return {"row_data": row.data, "row_scale": row.scale, "col_data": codes, "col_scale": scales}

    @classmethod
    def gather_fields(
        cls, spec: WeightSpec, context: FSDPGatherContext, shard: Shard | None = None
    ) -> tuple[str, ...]:
        """One direction in a forward pass that reshards, else both; replicated column scales are not sent."""
        if context.phase == "forward" and context.reshard_after_forward:
            return ("row_data", "row_scale") if spec.kind == "dense" else ("col_data", "col_scale")
        if shard is not None and shard.cuts_blocks and spec.kind == "dense":
            return cls.FIELDS[:3]
        return cls.FIELDS

    @classmethod
    def fold_gathered(cls, fields: Physical, spec: WeightSpec, local: Physical) -> Physical:
        """Gathered codes take the replicated column scales that every rank holds already."""
        if "col_data" in fields and "col_scale" not in fields:
            return {**fields, "col_scale": local["col_scale"]}
        return fields

    @classmethod
    def operand(cls, physical: Physical, spec: WeightSpec, orientation: Orientation) -> QuantizedOperand:
        """Views of one direction; grouped weights are transposed into the GEMM's [E, K, N]."""
        if orientation not in ("row", "col"):
            raise OperandError(f"orientation {orientation!r} is neither row nor col", where=spec.fqn)
        if f"{orientation}_data" not in physical:
            raise StaleWeightError(
                f"the {orientation} direction was not gathered in this phase (held: {sorted(physical)})",
                where=spec.fqn,
                remedy="run forward and backward under the same FSDP module",
            )
        data, scale = physical[f"{orientation}_data"], physical[f"{orientation}_scale"]
        if spec.kind == "grouped":
            data, scale = data.transpose(-1, -2), scale.transpose(-1, -2)
        return QuantizedOperand(data, scale, torch.bfloat16, spec.recipe.format, orientation)


class PerTensorWeight(QuantizedWeightTensor):
    """One set of codes and one FP32 scale: `data` and `scale` ([1] dense, [E] grouped), both directions' storage."""

    FIELDS = ("data", "scale")
    BYTES = 1.0

    @classmethod
    def quantize_master(cls, master: torch.Tensor, spec: WeightSpec, shard: Shard | None = None) -> Physical:
        """One call; a sharded dense weight takes the maximum of all its shards, so that its scale is one."""
        amax = None
        if shard is not None and spec.kind == "dense":
            # a NaN would not survive every library's maximum; Inf gives the same scale, 1
            amax = shard.maximum(master.abs().amax().float().nan_to_num(nan=torch.inf, posinf=torch.inf))
        operand = spec.recipe.quantizer(QuantizationRole.WEIGHT_FWD, spec.fqn).quantize(
            master, orientation="row", amax=amax
        )
        return {"data": operand.data, "scale": operand.scale.reshape(-1)}

    @classmethod
    def gather_fields(
        cls, spec: WeightSpec, context: FSDPGatherContext, shard: Shard | None = None
    ) -> tuple[str, ...]:
        """The same both ways."""
        return cls.FIELDS

    @classmethod
    def fold_gathered(cls, fields: Physical, spec: WeightSpec, local: Physical) -> Physical:
        """A dense scale arrives once a rank; all must be equal."""
        if spec.kind == "grouped":
            return fields
        scale = fields["scale"]
        if bool((scale != scale[0]).any()):
            raise GatherError(
                f"ranks hold different scales {scale.tolist()} of one dense weight", where=spec.fqn
            )
        return {**fields, "scale": scale[:1]}

    @classmethod
    def operand(cls, physical: Physical, spec: WeightSpec, orientation: Orientation) -> QuantizedOperand:
        """The one storage under either orientation."""
        data, scale = physical["data"], physical["scale"]
        if spec.kind == "grouped":
            return QuantizedOperand(
                data.transpose(-1, -2), scale, torch.bfloat16, spec.recipe.format, orientation
            )
        return QuantizedOperand(data, scale[0], torch.bfloat16, spec.recipe.format, orientation)


class HiF8Tensor(PerTensorWeight):
    """HiF8 codes under one FP32 scale."""


def check_master(master: torch.Tensor, fqn: str) -> torch.Tensor:
    """The tensor itself if it is a usable FP32 master: plain, FP32, 2-D or 3-D."""
    if master.dtype is not torch.float32:
        raise OperandError(
            f"master is {master.dtype}; codes are only ever derived from an FP32 master",
            where=fqn,
            remedy="keep the weight in FP32",
        )
    if master.ndim not in (2, 3):
        raise OperandError(f"master has shape {tuple(master.shape)}; wanted [N, K] or [E, N, K]", where=fqn)
    return master


WEIGHT_CLASSES: dict[str, type[QuantizedWeightTensor]] = {"mxfp8_e4m3": MXFP8Tensor, "hif8": HiF8Tensor}
