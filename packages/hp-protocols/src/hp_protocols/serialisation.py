"""Config trees as plain data, and back.

In: a tree of dataclasses. Out: dicts, lists, strings, numbers and None, with each node's class under `_type`;
reading it back gives an equal tree. Faults in the data are collected and raised together. Torch-free.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from enum import Enum
from pathlib import PurePath
from typing import Any, TypeVar

from .annotations import field_annotations, is_dataclass_type, mapping_types, sequence_reading, union_members
from .errors import ConfigError, Fault
from .plain_reader import KIND_KEY, PLACEMENT_FORMS, TYPE_KEY, PlainReader
from .references import dotted_name
from .traversal import is_node, join_fqn
from .types import Placement

__all__ = ["BY_NAME", "TYPE_KEY", "check_callables", "from_plain", "to_plain"]

NodeT = TypeVar("NodeT")

BY_NAME = "by_name"
"""Field metadata: a function in this field is written as its dotted name and stays that name when read."""

_PLAIN = (str, int, float, type(None))


def to_plain(root: Any) -> dict[str, Any]:
    """The tree as plain data.

    Raises:
        TypeError: a value has no plain form (a lambda, a tensor, …); the message has its FQN.
    """
    return _encode_node(root, "")


def from_plain(data: Mapping[str, Any], cls: type[NodeT]) -> NodeT:
    """The tree that `to_plain` wrote, checked to be a `cls`.

    Raises:
        ConfigError: everything that does not fit, with its place.
    """
    if not isinstance(data, Mapping):
        raise ConfigError(Fault(cls.__qualname__, f"expected a mapping, got {type(data).__name__}: {data!r}"))
    reader = PlainReader()
    node = reader.node(data, "", cls)
    if reader.faults:
        raise ConfigError(reader.faults)
    return node


def check_callables(root: Any) -> None:
    """Refuse callables that have no dotted name, so that every config which builds can also be saved.

    Raises:
        TypeError: with the FQN of the first one.
    """
    _check_callables(root, "", type(root).__qualname__)


def _check_callables(value: Any, fqn: str, root: str) -> None:
    if is_node(value):
        for field in dataclasses.fields(value):
            _check_callables(getattr(value, field.name), join_fqn(fqn, field.name), root)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _check_callables(item, join_fqn(fqn, key), root)
    elif isinstance(value, list | tuple | set | frozenset):
        for index, item in enumerate(value):
            _check_callables(item, join_fqn(fqn, index), root)
    elif callable(value) and not isinstance(value, type):
        _name(value, f"{root}: {fqn}")


def _name(value: Any, where: str) -> str:
    try:
        return dotted_name(value)
    except TypeError as error:
        raise TypeError(
            f"{where}: {error}; use a module-level function, or Function.Config(fn='package.module.name', kwargs=…)"
        ) from None


def _encode_node(node: Any, fqn: str) -> dict[str, Any]:
    data = {TYPE_KEY: _name(type(node), fqn or type(node).__qualname__)}
    if hasattr(node, "plain_fields"):
        names = node.plain_fields()
    else:
        names = [field.name for field in dataclasses.fields(node)]
    cls: Any = type(node)
    annotations = field_annotations(cls)
    by_name = {field.name for field in dataclasses.fields(node) if field.metadata.get(BY_NAME)}
    for name in names:
        value = getattr(node, name)
        if name in by_name and callable(value):
            data[name] = _name(value, join_fqn(fqn, name))
        else:
            data[name] = _encode(value, annotations[name], join_fqn(fqn, name))
    return data


def _encode(value: Any, annotation: Any, fqn: str) -> Any:
    members = union_members(annotation)
    if is_node(value):
        return _encode_node(value, fqn)
    if isinstance(value, dict):
        return _encode_dict(value, members, fqn)
    if isinstance(value, list | tuple | set | frozenset):
        return _encode_sequence(value, members, fqn)
    kind, plain = _leaf(value, fqn)
    reader = PlainReader()
    read = reader.value(plain, annotation, fqn)
    if not reader.faults and type(read) is type(value) and read == value:
        return plain
    if kind == "enum":
        return {KIND_KEY: kind, "class": _name(type(value), fqn), "value": plain}
    return {KIND_KEY: kind, "value": plain}


def _leaf(value: Any, fqn: str) -> tuple[str, Any]:
    """Kind and plain form of a value that has no parts."""
    if isinstance(value, Enum):
        return "enum", value.value if isinstance(value.value, str | int) else value.name
    if isinstance(value, PurePath):
        return "path", str(value)
    if isinstance(value, Placement):
        return "placement", _placement_text(value, fqn)
    if isinstance(value, _PLAIN):
        return "plain", value
    if callable(value):
        return "callable", _name(value, fqn)
    raise TypeError(f"{fqn}: a {type(value).__name__} cannot be written as plain data: {value!r}")


def _encode_sequence(value: Any, members: list[Any], fqn: str) -> Any:
    reading = sequence_reading(members)
    items = [_encode(item, reading.item(index), join_fqn(fqn, index)) for index, item in enumerate(value)]
    if isinstance(value, set | frozenset):
        items.sort(key=repr)
    if type(value) is reading.kind:
        return items
    if type(value) not in (list, tuple, set, frozenset):
        raise TypeError(f"{fqn}: a {type(value).__name__} cannot be written as plain data; use a list or a tuple")
    return {KIND_KEY: type(value).__name__, "value": items}


def _encode_dict(value: dict[Any, Any], members: list[Any], fqn: str) -> Any:
    if type(value) is not dict:
        raise TypeError(f"{fqn}: a {type(value).__name__} cannot be written as plain data; use a dict")
    key_type, value_type = mapping_types(members) or (Any, Any)
    keys = [_encode(key, key_type, f"{fqn} (key {key!r})") for key in value]
    items = [_encode(item, value_type, join_fqn(fqn, key)) for key, item in value.items()]
    readable = mapping_types(members) or not any(is_dataclass_type(member) for member in members)
    if readable and all(isinstance(key, _PLAIN) and key not in (TYPE_KEY, KIND_KEY) for key in keys):
        return dict(zip(keys, items, strict=True))
    return {KIND_KEY: "dict", "value": [list(pair) for pair in zip(keys, items, strict=True)]}


def _placement_text(placement: Any, fqn: str) -> str:
    name = type(placement).__name__
    if name == "Shard":
        return f"Shard({placement.dim})"
    if name == "Replicate":
        return "Replicate()"
    if name == "Partial":
        return f"Partial({placement.reduce_op})"
    raise TypeError(f"{fqn}: a {name} cannot be written as plain data; a config may hold {PLACEMENT_FORMS}")
