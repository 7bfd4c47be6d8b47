"""Walking a config tree, with the place of each node, so that a node can be replaced where it stands.

In: a dataclass tree with lists, tuples and dicts. Out: `walk`, `set_node`, and `TupleItems`, a writable view of a
tuple that is part of a tree. Torch-free.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

__all__ = ["TupleItems", "is_node", "join_fqn", "set_node", "walk"]


class TupleItems:
    """The items of a tuple in a config tree. Setting one puts a new tuple in the place of the old one."""

    __slots__ = ("_key", "_parent")

    def __init__(self, parent: Any, key: str | int) -> None:
        self._parent = parent
        self._key = key

    def _tuple(self) -> tuple[Any, ...]:
        parent, key = self._parent, self._key
        return getattr(parent, key) if is_node(parent) else parent[key]  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self._tuple())

    def __getitem__(self, index: int) -> Any:
        return self._tuple()[index]

    def __setitem__(self, index: int, value: Any) -> None:
        old = self._tuple()
        items = list(old)
        items[index] = value
        new = old._make(items) if hasattr(old, "_make") else type(old)(items)
        set_node(self._parent, self._key, new)


def set_node(parent: Any, key: str | int, value: Any) -> None:
    """Put `value` in the place that `walk` or `Config.traverse` gave as `(parent, key)`.

    Raises:
        ValueError: the place is the root, which has no parent.
    """
    if parent is None:
        raise ValueError("the root of a config tree stands in no other node; use the new node instead of it")
    if is_node(parent):
        setattr(parent, str(key), value)
    else:
        parent[key] = value


def walk(root: Any) -> Iterator[tuple[str, Any, Any, Any]]:
    """Every dataclass node as `(fqn, node, parent, key)`, the root first with `("", root, None, None)`."""
    return _walk(root, "", None, None)


def _walk(value: Any, fqn: str, parent: Any, key: Any) -> Iterator[tuple[str, Any, Any, Any]]:
    inner = value
    items: list[tuple[Any, Any]]
    if is_node(value):
        yield fqn, value, parent, key
        items = [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    elif isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list | tuple):
        items = list(enumerate(value))
        if isinstance(value, tuple):
            inner = TupleItems(parent, key)
    else:
        return
    for name, item in items:
        yield from _walk(item, join_fqn(fqn, name), inner, name)


def is_node(value: Any) -> bool:
    """Whether this is a node of a config tree: an instance of a dataclass."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def join_fqn(fqn: str, name: object) -> str:
    """The FQN of what is called `name` in the node `fqn`."""
    return f"{fqn}.{name}" if fqn else str(name)
