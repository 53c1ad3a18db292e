"""FQNs that differ in layer numbers alone, written as one: `model.layers.{0-27}.mlp.gate`.

What comes out is a pattern of the one glob language: in a config it hits just the names that went in. May
import: nothing of Quaver.
"""

from __future__ import annotations

from collections.abc import Iterable


def collapse(fqns: Iterable[str]) -> list[str]:
    """Merges FQNs over their integer components, in order of first appearance.

    Every name is matched by exactly one of the results, and no result matches any other name: a result with
    several `{...}` stands for their whole product, so names are merged only where the product is complete.
    """
    rows = list(dict.fromkeys(tuple(fqn.split(".")) for fqn in fqns))
    width = max((len(row) for row in rows), default=0)
    for position in reversed(range(width)):
        # names that agree everywhere but at this position, where each has an integer
        groups: dict[tuple[str, ...], list[int]] = {}
        for row in rows:
            number = row[position] if position < len(row) else ""
            is_number = number.isdecimal() and str(int(number)) == number  # "007" is a name, not 7
            key = (*row[:position], "", *row[position + 1 :], "") if is_number else row
            groups.setdefault(key, []).append(int(number) if is_number else -1)
        rows = [
            (*key[:position], ranges(numbers), *key[position + 1 : -1]) if numbers[0] >= 0 else key
            for key, numbers in groups.items()
        ]
    return [".".join(row) for row in rows]


def ranges(numbers: Iterable[int]) -> str:
    """3 -> "3"; 0, 1, 2, 7 -> "{0-2,7}"."""
    ordered = sorted(set(numbers))
    if len(ordered) == 1:
        return str(ordered[0])
    parts: list[list[int]] = []
    for number in ordered:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return "{" + ",".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts) + "}"
