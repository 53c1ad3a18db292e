"""The one glob matcher for fully qualified names (FQNs): replacement, freezing, recompute, optimiser groups.

One matcher, so that a pattern means the same everywhere and its hit list can be printed and stored. A pattern
is a row of components joined by dots:

    `q_proj`   that name                          `*`       any run of characters inside one component
    `**`       any number of components, or none  `{*}`     any integer       `{0-3,7}`  these integers

An integer in braces is always a *whole* run of digits, without leading zeros: `layers{1}` does not match
`layers12`. Everything else is malformed and raises `PlanError`; a pattern never quietly matches nothing.
Imports `quaver.errors` alone.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from functools import lru_cache

from quaver.errors import PlanError

_TOKEN = re.compile(r"(?P<literal>[A-Za-z0-9_-]+)|(?P<star>\*)|\{(?P<integers>[^{}]*)\}")
_RANGE = re.compile(r"(?P<low>0|[1-9][0-9]{0,8})(?:-(?P<high>0|[1-9][0-9]{0,8}))?")
_SYNTAX = "use names, `*` (in one level), `**` (any depth), `{*}` (any integer), `{0-3,7}` (these integers)"
_DIGITS = "digits beside braces can never match a whole integer"


def match(pattern: str, fqns: Iterable[str]) -> list[str]:
    """Return those of `fqns` that `pattern` matches, in their own order.

    Args:
        pattern: a glob over dotted names (see the module's docstring).
        fqns: names of modules or parameters; the root module's is the empty string, which only `**` matches.

    Raises:
        PlanError: the pattern is malformed.
    """
    fullmatch = _compiled(pattern).fullmatch
    return [fqn for fqn in fqns if fullmatch(fqn + "." if fqn else "") is not None]


def matches(pattern: str, fqn: str) -> bool:
    """Whether `pattern` matches the one name `fqn`.

    Raises:
        PlanError: the pattern is malformed.
    """
    return _compiled(pattern).fullmatch(fqn + "." if fqn else "") is not None


def components(pattern: str) -> list[str]:
    """Split a well-formed pattern at its dots (no component can hold a dot, braces included).

    Raises:
        PlanError: the pattern is malformed.
    """
    _compiled(pattern)
    return pattern.split(".")


def is_wildcard(component: str) -> bool:
    """Whether a component of a pattern can match more than one name."""
    return "*" in component or "{" in component


def nearest(name: str, candidates: Iterable[str], *, count: int = 3) -> list[str]:
    """Names that look like `name`, for "did you mean"; integers fold, so that all layers give one name."""
    folded = dict.fromkeys(re.sub(r"(?<![^.])[0-9]+(?![^.])", "{*}", candidate) for candidate in candidates)
    return difflib.get_close_matches(name, [c for c in folded if c], n=count, cutoff=0.5)


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """A remedy sentence that names the closest candidates, or says that nothing is close."""
    close = nearest(name, candidates)
    return f"did you mean {' or '.join(close)}?" if close else "no name in the model is close to it"


def _compiled(pattern: str) -> re.Pattern[str]:
    if not isinstance(pattern, str):
        raise PlanError(f"a pattern must be a string, got {type(pattern).__name__}", where=repr(pattern))
    return _translate(pattern)


@lru_cache(maxsize=4096)
def _translate(pattern: str) -> re.Pattern[str]:
    """A regular expression for names in which a dot *ends* every component: `**` may then stand for none."""
    if not pattern:
        raise PlanError("an empty pattern matches nothing", where="pattern ''", remedy=_SYNTAX)
    regex, previous = "", ""
    for component in pattern.split("."):
        if component != "**":
            regex += _component(component, pattern) + r"\."
        elif previous != "**":  # `**.**` means `**`, and once is what keeps the search short
            regex += r"(?:[^.]+\.)*"
        previous = component
    return re.compile(regex)


def _component(component: str, pattern: str) -> str:
    """The regular expression of one component, which never crosses a dot."""
    where = f"pattern {pattern!r}, component {component!r}"
    regex, position, previous = "", 0, ""
    while position < len(component):
        token = _TOKEN.match(component, position)
        if token is None:
            raise PlanError("the pattern is malformed", where=where, remedy=_SYNTAX)
        kind = str(token.lastgroup)
        if kind == previous == "star":
            raise PlanError("`**` must stand alone between dots", where=where, remedy=_SYNTAX)
        if kind == "literal":
            text = token["literal"]
            if previous == "integers" and text[0].isdigit():
                raise PlanError(_DIGITS, where=where, remedy=_SYNTAX)
            regex += re.escape(text)
        elif kind == "star":
            regex += "[^.]*"
        else:
            if previous == "integers" or (previous == "literal" and component[position - 1].isdigit()):
                raise PlanError(_DIGITS, where=where, remedy=_SYNTAX)
            regex += rf"(?<![0-9])(?:{_integers(token['integers'], where)})(?![0-9])"
        position, previous = token.end(), kind
    if not component:
        raise PlanError("the pattern has an empty component", where=where, remedy="remove the stray dot")
    if set(component) == {"*"}:
        regex = "[^.]+"  # a name is never empty
    return regex


def _integers(text: str, where: str) -> str:
    """The alternatives of `{...}`: `*`, or integers and ascending ranges joined by commas."""
    if text == "*":
        return "0|[1-9][0-9]*"
    alternatives = []
    for part in text.split(","):
        bounds = _RANGE.fullmatch(part)
        if bounds is None:
            raise PlanError(f"{{{text}}} is not a list of integers and ranges", where=where, remedy=_SYNTAX)
        low = bounds["low"]
        high = bounds["high"] or low
        if int(high) < int(low):
            raise PlanError(f"the range {part} runs downward", where=where, remedy=f"write {high}-{low}")
        alternatives.extend(_range(int(low), int(high)))
    return "|".join(alternatives)


def _range(low: int, high: int) -> list[str]:
    """Regular expressions whose union is the integers from `low` to `high`: one per number of digits."""
    parts = []
    while low <= high:
        top = min(high, 10 ** len(str(low)) - 1)
        parts.append(_digits(str(low), str(top)))
        low = top + 1
    return parts


def _digits(low: str, high: str) -> str:
    """One regular expression for the integers from `low` to `high`, both with the same number of digits."""
    if low == high:
        return low
    rest = len(low) - 1
    if rest == 0:
        return f"[{low}-{high}]"
    if low[0] == high[0]:
        return low[0] + _digits(low[1:], high[1:])
    first, last = int(low[0]), int(high[0])
    parts = [low[0] + _digits(low[1:], "9" * rest), high[0] + _digits("0" * rest, high[1:])]
    if first + 1 <= last - 1:
        parts.append(f"[{first + 1}-{last - 1}][0-9]{{{rest}}}")
    return f"(?:{'|'.join(parts)})"
