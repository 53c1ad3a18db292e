"""`Section`: what every part of the config is made of.

Frozen, no unknown keys, no coercion (a bool is no number, "3" is no 3), positional arguments in field order
for library users, and `ConfigError` in place of pydantic's own. May import pydantic and this room's tools.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Strict,
    ValidationError,
    model_validator,
)

from quaver.config.describe import keys_of
from quaver.config.problems import Path, did_you_mean, from_validation, join_errors, not_supported, problem

MANY = 10**9  # counts of anything lie below: what is larger is a slip of the hand, and overflows somewhere
_Item = TypeVar("_Item")
# YAML has lists where a frozen section holds tuples; what is in them stays strict.
Many = Annotated[tuple[_Item, ...], Strict(False)]


class Section(BaseModel):
    """A frozen part of the config; keys it does not know are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    # keys for which null means "not given": an override cannot take a key out of a file, but it can null it
    null_is_absent: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Takes its fields by position or by name; raises ConfigError for any that does not fit."""
        fields = type(self).model_fields
        if len(args) > len(fields):
            raise TypeError(f"{type(self).__name__} takes at most {len(fields)} arguments, got {len(args)}")
        for name, value in zip(fields, args):
            if name in kwargs:
                raise TypeError(f"{type(self).__name__} got {name!r} twice, by position and by name")
            kwargs[name] = value
        # a field whose YAML key differs (`_target_`) goes by its Python name here
        data = {
            keys_of(key, fields[key])[0] if key in fields else key: value for key, value in kwargs.items()
        }
        try:
            super().__init__(**data)
        except ValidationError as error:
            name = type(self).__name__
            raise join_errors(from_validation(error, type(self), lambda path: name), name) from None

    # pydantic would call an overridden __init__ for nested sections as well, and each would raise its own
    # ConfigError; marked so, nested sections are validated by its core and all problems come out together.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @classmethod
    def from_data(cls, data: Mapping[str, Any], *, place: Callable[[Path], str], source: str) -> Self:
        """Validates plain data; `place` says where each path was written. Raises ConfigError."""
        try:
            return cls.model_validate(dict(data))
        except ValidationError as error:
            raise join_errors(from_validation(error, cls, place), source) from None

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        if isinstance(data, dict):
            return {k: v for k, v in data.items() if not (v is None and k in cls.null_is_absent)}
        return data

    def unused_fields(self) -> frozenset[str]:
        """Fields that have no meaning beside the others' values, and so are not written back."""
        return frozenset()


def supported(what: str, *legal: str, instead: str | None = None) -> BeforeValidator:
    """A check for text of which this release does only `legal`: anything else is 'not supported'.

    `instead` is what the remedy says; it lists `legal` by default.
    """
    remedy = instead or f"this release has: {', '.join(legal)}"

    def check(value: Any) -> Any:
        if isinstance(value, str) and value not in legal:
            guess = did_you_mean(value, legal)
            raise not_supported(f"{what} {value!r}", remedy=f"{guess} {remedy}" if guess else remedy)
        return value

    return BeforeValidator(check)


def only(value: object, what: str, remedy: str) -> AfterValidator:
    """A check for a key that exists but of which this release does only one value."""

    def check(given: Any) -> Any:
        if given != value:
            raise not_supported(f"{what}, got {_plain(given)}", remedy=remedy)
        return given

    return AfterValidator(check)


def _plain(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def _not_empty(value: str) -> str:
    if not value.strip():
        raise problem("is empty, wanted text")
    return value


Text = Annotated[str, AfterValidator(_not_empty)]
