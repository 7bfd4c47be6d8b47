"""What differs between two configs, value by value.

In: two config trees. Out: one `Difference` per path whose values are not the same, in the order of the first tree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hp_config.tree import join_path
from hp_protocols.serialisation import TYPE_KEY, to_plain

__all__ = ["ABSENT", "Difference", "diff_configs"]


class _Absent:
    """Stands for a value that only one of the two trees has."""

    def __repr__(self) -> str:
        return "(absent)"


ABSENT = _Absent()


@dataclass(frozen=True, slots=True)
class Difference:
    """One path at which two configs differ; a value is plain data, or `ABSENT`."""

    path: str
    left: Any
    right: Any

    def __str__(self) -> str:
        return f"{self.path}: {_show(self.left)} → {_show(self.right)}"


def diff_configs(left: Any, right: Any) -> list[Difference]:
    """All differences from `left` to `right`; empty if they say the same.

    Raises:
        TypeError: a config holds a value that has no plain form.
    """
    return list(_diff(to_plain(left), to_plain(right), ""))


def _diff(left: Any, right: Any, path: str) -> Iterator[Difference]:
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        for key in [*left, *(key for key in right if key not in left)]:
            yield from _diff(left.get(key, ABSENT), right.get(key, ABSENT), join_path(path, key))
    elif isinstance(left, list) and isinstance(right, list) and _hold_trees(left, right):
        for index in range(max(len(left), len(right))):
            one, other = (side[index] if index < len(side) else ABSENT for side in (left, right))
            yield from _diff(one, other, join_path(path, index))
    elif left != right or isinstance(left, bool) != isinstance(right, bool):
        yield Difference(path, left, right)


def _hold_trees(*sides: list[Any]) -> bool:
    """Lists of plain values are compared as one value, lists of nodes item by item."""
    return all(any(isinstance(item, Mapping | list) for item in side) for side in sides)


def _show(value: Any) -> str:
    if isinstance(value, Mapping) and TYPE_KEY in value:
        return str(value[TYPE_KEY])
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
