"""How the chosen modules compute (`low_precision`) and which modules they are (`plan_overrides`).

The two are kept apart: a format is chosen without touching the list of modules, and the list is the same for
every format. Strings only; the classes and factories behind the names are bound in `assembly`. Formats beside the
built-in ones come as an argument (`FormatName`), never by registering themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, PrivateAttr, ValidatorFunctionWrapHandler, model_validator

from quaver.config.base import Many, Section, Text, supported
from quaver.config.names import LEGAL_PAIRS, MODULE_TYPES, RECIPE_IDS, REPLACEMENTS, canonical, spellings
from quaver.config.problems import did_you_mean, problem
from quaver.errors import ConfigError

Format = Literal["mxfp8_e4m3", "hif8"]
Scaling = Literal["mx_block", "current"]
ScaleRule = Literal["floor", "rceil"]
Backend = Literal["reference", "npu", "cuda"]



@dataclass(frozen=True)
class FormatName:
    """A format beside the built-in ones, as a config knows it.

    Args:
        format: value of `low_precision.format`.
        scaling: the one value of `low_precision.scaling` that goes with it.
        recipe_id: name and version of its numeric recipe.
    """

    format: str
    scaling: str
    recipe_id: str


def _pairs(pairs: Sequence[tuple[str, str]]) -> str:
    return "legal pairs: " + ", ".join(f"{fmt} + {scaling}" for fmt, scaling in pairs)


_PAIRS = _pairs(LEGAL_PAIRS)


class LowPrecisionConfig(Section):
    """How the GEMMs of the replaced modules compute; says nothing of which modules."""

    null_is_absent = frozenset({"scale_rule"})
    legal_pairs: ClassVar[tuple[tuple[str, str], ...]] = LEGAL_PAIRS
    more_formats: ClassVar[tuple[FormatName, ...]] = ()

    enabled: bool = Field(False, description="Compute the modules of plan_overrides in eight bits.")
    format: Annotated[Format, supported("format", "mxfp8_e4m3", "hif8", instead=_PAIRS)] = Field(
        "mxfp8_e4m3", description="Element format of weights, activations and gradients."
    )
    scaling: Annotated[Scaling, supported("scaling", "mx_block", "current", instead=_PAIRS)] = Field(
        "mx_block",
        description="Where scales come from: mx_block (MXFP8, 32 elements each), current (HiF8, amax).",
    )
    backend: Backend = Field(
        "reference",
        description="Who computes the GEMMs: reference (any machine, exact), npu (Ascend A5), cuda.",
    )
    scale_rule: ScaleRule = Field(
        "floor", description="How MXFP8 rounds a block's scale to a power of two; an error beside hif8."
    )

    @model_validator(mode="after")
    def _check_pair(self) -> LowPrecisionConfig:
        if (self.format, self.scaling) not in self.legal_pairs:
            raise problem(
                f"format {self.format!r} does not go with scaling {self.scaling!r}",
                remedy=_pairs(self.legal_pairs),
                key="scaling" if "scaling" in self.model_fields_set else "format",
            )
        if self.format != "mxfp8_e4m3" and "scale_rule" in self.model_fields_set:
            raise problem(
                f"scale_rule belongs to MXFP8 and means nothing beside format {self.format!r}",
                remedy="remove scale_rule (or set it to null)",
                key="scale_rule",
            )
        return self

    def unused_fields(self) -> frozenset[str]:
        """`scale_rule` beside other formats than MXFP8, where giving it is an error."""
        return frozenset({"scale_rule"}) if self.format != "mxfp8_e4m3" else frozenset()

    @property
    def recipe_id(self) -> str:
        """Name and version of the numeric recipe: a changed constant is a new version, not a new meaning."""
        if self.format == "hif8":
            return "hif8/current@1"
        for more in self.more_formats:
            if more.format == self.format:
                return more.recipe_id
        return f"mxfp8_e4m3/mx_block/{self.scale_rule}@1"


def low_precision_class(formats: Sequence[FormatName]) -> type[LowPrecisionConfig]:
    """`LowPrecisionConfig` that knows more formats, with the checks and messages of the built-in ones.

    Raises:
        ConfigError: a format or recipe id that is there already.
    """
    if not formats:
        return LowPrecisionConfig
    known, recipes = {fmt for fmt, _ in LEGAL_PAIRS}, set(RECIPE_IDS)
    for more in formats:
        if more.format in known or more.recipe_id in recipes:
            raise ConfigError(
                f"the format {more.format!r} with recipe {more.recipe_id!r} is there already",
                where="formats",
                remedy="give it another name",
            )
        known.add(more.format)
        recipes.add(more.recipe_id)
    pairs = (*LEGAL_PAIRS, *((more.format, more.scaling) for more in formats))
    names, scalings = [fmt for fmt, _ in pairs], list(dict.fromkeys(scaling for _, scaling in pairs))
    fields = LowPrecisionConfig.model_fields

    a_format = Annotated[str, supported("format", *names, instead=_pairs(pairs))]
    a_scaling = Annotated[str, supported("scaling", *scalings, instead=_pairs(pairs))]

    class Extended(LowPrecisionConfig):
        legal_pairs = pairs
        more_formats = tuple(formats)
        format: a_format = Field("mxfp8_e4m3", description=fields["format"].description)  # type: ignore
        scaling: a_scaling = Field("mx_block", description=fields["scaling"].description)  # type: ignore

    Extended.__name__ = LowPrecisionConfig.__name__
    Extended.__doc__ = LowPrecisionConfig.__doc__
    return Extended


def _as_patterns(value: Any) -> Any:
    value = [value] if isinstance(value, str) else value
    if isinstance(value, list | tuple) and not value:
        raise problem("names no module", remedy="give at least one FQN pattern")
    return value


def _as_module_name(value: Any) -> Any:
    if isinstance(value, type):
        name = f"{value.__module__}.{value.__qualname__}"
        return canonical(MODULE_TYPES, name) or name
    if isinstance(value, str):
        known = canonical(MODULE_TYPES, value)
        if known is None:
            raise _unknown_name(value, MODULE_TYPES, "In Python, pass the class itself.")
        return known
    return value


def _as_replacement(value: Any) -> Any:
    if isinstance(value, dict):
        if set(value) != {"_target_"}:
            raise problem(
                f"wanted a mapping with the one key _target_, got the keys {list(value)}",
                remedy=f"or give a short name: {', '.join(REPLACEMENTS)}",
            )
        value = value["_target_"]
    if isinstance(value, str):
        known = canonical(REPLACEMENTS, value)
        if known is None:
            raise _unknown_name(value, REPLACEMENTS)
        return known
    return value


def _unknown_name(given: str, table: dict[str, tuple[str, ...]], more: str = "") -> Exception:
    guess = did_you_mean(given, spellings(table))
    parts = [guess, f"known names: {', '.join(table)}.", more]
    return problem(
        f"unknown name {given!r}: nothing is imported from a config, its names come from a fixed table",
        remedy=" ".join(part for part in parts if part),
    )


class ReplacementRule(Section):
    """Which modules are replaced, and by what; one rule of the replacement plan."""

    match: Annotated[Many[Text], BeforeValidator(_as_patterns)] = Field(
        description="FQN pattern or a list: * is one level, ** any depth, {*} a number, {0-3,7} numbers."
    )
    module_type: Annotated[str, BeforeValidator(_as_module_name)] = Field(
        description="Class that a matched module must have: a known dotted name (in Python, any class)."
    )
    replace_module: Annotated[str, BeforeValidator(_as_replacement)] = Field(
        description="What replaces it: a registered short name, or {_target_: name}."
    )
    exact_type: bool = Field(True, description="Refuse subclasses of module_type (PEFT and custom wrappers).")
    when: Annotated[Literal["low_precision"], supported("a rule for", "low_precision")] = Field(
        "low_precision", description="The block whose `enabled` switches the rule on."
    )

    _module_class: type | None = PrivateAttr(None)

    @model_validator(mode="wrap")
    @classmethod
    def _keep_class(cls, data: Any, handler: ValidatorFunctionWrapHandler) -> ReplacementRule:
        rule: ReplacementRule = handler(data)
        if isinstance(data, dict) and isinstance(data.get("module_type"), type):
            rule._module_class = data["module_type"]
        return rule

    @property
    def module_class(self) -> type | None:
        """The class given in Python, or None where `module_type` was given by name."""
        return self._module_class

    # Two rules are equal when their fields are: a bound class is the same fact as its dotted name.
    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ReplacementRule):
            return NotImplemented
        return self._facts() == other._facts()

    def __hash__(self) -> int:
        return hash(self._facts())

    def _facts(self) -> tuple[Any, ...]:
        return (self.match, self.module_type, self.replace_module, self.exact_type, self.when)
