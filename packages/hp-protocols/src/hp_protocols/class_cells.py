"""Zero-argument `super()` in dataclasses with slots.

In: a class that `@dataclass(slots=True)` has made anew. Out: its methods, whose `super()` still pointed at the class
before (Python 3.11 to 3.13 do not repair this), point at the new one.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any

__all__ = ["point_super_here"]


def point_super_here(cls: type) -> None:
    """Make `super()` in the methods of `cls` refer to `cls`, if `cls` is the slotted copy of another class.

    Reaches functions inside properties, classmethods, staticmethods, partial methods, decorators and closures.
    """
    fields = cls.__dict__.get("__dataclass_fields__")
    if fields is None:
        return  # The class before @dataclass: its methods already point at it.
    seen: set[int] = set()
    for value in list(cls.__dict__.values()):
        for function in _functions(value, seen):
            for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
                if name == "__class__" and _is_before(cell, cls, fields):
                    cell.cell_contents = cls


def _is_before(cell: types.CellType, cls: type, fields: Any) -> bool:
    """Whether the cell holds the class that `cls` was copied from: the copy takes over its very dict of fields."""
    try:
        old = cell.cell_contents
    except ValueError:  # Still empty: the class body is being executed.
        return False
    return isinstance(old, type) and old is not cls and old.__dict__.get("__dataclass_fields__") is fields


def _functions(value: Any, seen: set[int]) -> Iterator[types.FunctionType]:
    """Every Python function that `value` is, wraps, or closes over."""
    if id(value) in seen:
        return
    seen.add(id(value))
    inner: list[Any] = []
    if isinstance(value, types.FunctionType):
        yield value
        inner += [value.__dict__.get("__wrapped__"), *_contents(value.__closure__ or ())]
    elif isinstance(value, property):
        inner += [value.fget, value.fset, value.fdel]
    elif isinstance(value, classmethod | staticmethod):
        inner.append(value.__func__)
    elif isinstance(value, functools.partial | functools.partialmethod | functools.cached_property):
        inner.append(getattr(value, "func", None))
    elif callable(wrapped := getattr(value, "__wrapped__", None)):
        inner.append(wrapped)
    for part in inner:
        yield from _functions(part, seen)


def _contents(cells: tuple[types.CellType, ...]) -> Iterator[Any]:
    for cell in cells:
        try:
            content = cell.cell_contents
        except ValueError:
            continue
        # Classes are left out: a method may close over another class, whose methods are none of ours.
        if not isinstance(content, type):
            yield content
