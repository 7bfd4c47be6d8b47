"""Config trees as plain data, and back.

In: a tree of dataclasses. Out: dicts, lists, strings, numbers and None, with each node's class under `_type`;
reading it back gives an equal tree. Faults in the data are collected and raised together. Torch-free.
"""

from __future__ import annotations

import collections.abc as abc
import dataclasses
import re
from collections.abc import Mapping
from enum import Enum
from pathlib import PurePath
from typing import Any, TypeVar

from .annotations import (
    field_annotations,
    is_wild,
    mapping_types,
    sequence_reading,
    string_reading,
    union_members,
)
from .errors import ConfigError, Fault, nearest
from .references import UnknownNameError, dotted_name, resolve_name
from .types import Placement

__all__ = ["BY_NAME", "TYPE_KEY", "check_callables", "from_plain", "to_plain"]

NodeT = TypeVar("NodeT")

TYPE_KEY = "_type"
"""The key of a node's class, a dotted name."""

KIND_KEY = "_kind"
"""The key of a value's kind, where the field's annotation does not tell it: `{"_kind": "tuple", "value": [1, 2]}`."""

BY_NAME = "by_name"
"""Field metadata: a function in this field is written as its dotted name and stays that name when read."""

_PLACEMENT = re.compile(r"(Shard)\((-?\d+)\)|(Replicate)\(\)|(Partial)\((\w+)\)")
_PLACEMENT_FORMS = "Shard(dim), Replicate(), Partial(sum)"
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
    reader = _Reader()
    node = reader.node(data, "", cls)
    if reader.faults:
        raise ConfigError(reader.faults)
    return node  # type: ignore[no-any-return]


def check_callables(root: Any) -> None:
    """Refuse callables that have no dotted name, so that every config which builds can also be saved.

    Raises:
        TypeError: with the FQN of the first one.
    """
    _check_callables(root, "", type(root).__qualname__)


def _check_callables(value: Any, fqn: str, root: str) -> None:
    if _is_node(value):
        for field in dataclasses.fields(value):
            _check_callables(getattr(value, field.name), _join(fqn, field.name), root)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _check_callables(item, _join(fqn, key), root)
    elif isinstance(value, list | tuple | set | frozenset):
        for index, item in enumerate(value):
            _check_callables(item, _join(fqn, index), root)
    elif callable(value) and not isinstance(value, type):
        _name(value, f"{root}: {fqn}")


def _name(value: Any, where: str) -> str:
    try:
        return dotted_name(value)
    except TypeError as error:
        raise TypeError(
            f"{where}: {error}; use a module-level function, or Function.Config(fn='package.module.name', kwargs=…)"
        ) from None


# Writing


def _encode_node(node: Any, fqn: str) -> dict[str, Any]:
    data = {TYPE_KEY: _name(type(node), fqn or type(node).__qualname__)}
    if hasattr(node, "plain_fields"):
        names = node.plain_fields()
    else:
        names = [field.name for field in dataclasses.fields(node)]
    annotations = field_annotations(type(node))
    by_name = {field.name for field in dataclasses.fields(node) if field.metadata.get(BY_NAME)}
    for name in names:
        value = getattr(node, name)
        if name in by_name and callable(value):
            data[name] = _name(value, _join(fqn, name))
        else:
            data[name] = _encode(value, annotations[name], _join(fqn, name))
    return data


def _encode(value: Any, annotation: Any, fqn: str) -> Any:
    members = union_members(annotation)
    if _is_node(value):
        return _encode_node(value, fqn)
    if isinstance(value, dict):
        return _encode_dict(value, members, fqn)
    if isinstance(value, list | tuple | set | frozenset):
        return _encode_sequence(value, members, fqn)
    kind, plain = _leaf(value, fqn)
    reader = _Reader()
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
    items = [_encode(item, reading.item(index), _join(fqn, index)) for index, item in enumerate(value)]
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
    items = [_encode(item, value_type, _join(fqn, key)) for key, item in value.items()]
    readable = mapping_types(members) or not any(_is_dataclass(member) for member in members)
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
    raise TypeError(f"{fqn}: a {name} cannot be written as plain data; a config may hold {_PLACEMENT_FORMS}")


# Reading


class _Reader:
    """Reads plain data and keeps the faults; where there is one, the value it returns is of no use."""

    def __init__(self) -> None:
        self.faults: list[Fault] = []

    def fault(self, where: str, problem: str, allowed: str | None = None, hint: str | None = None) -> None:
        self.faults.append(Fault(where, problem, allowed, hint))

    def node(self, data: Mapping[str, Any], fqn: str, expected: type | None) -> Any:
        cls = self._class(data, fqn, expected)
        if cls is None:
            return None
        annotations = field_annotations(cls)
        values: dict[str, Any] = {}
        for key, item in data.items():
            if key == TYPE_KEY:
                continue
            if key not in annotations:
                near = nearest(str(key), annotations)
                self.fault(
                    _join(fqn, key),
                    f"unknown key of {cls.__qualname__}",
                    ", ".join(annotations) or "none",
                    f"did you mean {near!r}?" if near else None,
                )
                continue
            values[key] = self.value(item, annotations[key], _join(fqn, key))
        before = len(self.faults)
        if hasattr(cls, "from_plain_fields"):
            complete = False
        else:
            complete = self._check_required(cls, values, data, fqn)
        if self.faults and (before or len(self.faults) > before):
            return None
        return self._construct(cls, values, fqn, complete)

    def _check_required(self, cls: Any, values: dict[str, Any], data: Mapping[str, Any], fqn: str) -> bool:
        """Note the fields that are missing; whether every field of the class was given."""
        fields = dataclasses.fields(cls)
        for field in fields:
            has_default = field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
            if field.init and not has_default and field.name not in data:
                self.fault(_join(fqn, field.name), f"missing; {cls.__qualname__} needs it")
        return all(field.name in values for field in fields)

    def _construct(self, cls: Any, values: dict[str, Any], fqn: str, complete: bool) -> Any:
        try:
            if hasattr(cls, "from_plain_fields"):
                return cls.from_plain_fields(values)
            init = {field.name for field in dataclasses.fields(cls) if field.init}
            node = cls(**{name: value for name, value in values.items() if name in init})
        except ConfigError as error:
            self.faults += [dataclasses.replace(fault, where=_join(fqn, fault.where)) for fault in error.faults]
            return None
        except (TypeError, ValueError) as error:
            self.fault(fqn or cls.__qualname__, f"{cls.__qualname__} refuses its values: {error}")
            return None
        # A tree that names every field is a written one: what __post_init__ made of the values is in it already.
        for name, value in values.items():
            if complete or name not in init:
                object.__setattr__(node, name, value)
        return node

    def _class(self, data: Mapping[str, Any], fqn: str, expected: type | None) -> type | None:
        where = _join(fqn, TYPE_KEY)
        if TYPE_KEY not in data:
            return expected
        name = data[TYPE_KEY]
        try:
            cls = resolve_name(name) if isinstance(name, str) else None
        except UnknownNameError as error:
            hint = f"did you mean {error.suggestion!r}?" if error.suggestion else None
            self.fault(where, f"{name!r} {error.problem}", hint=hint)
            return None
        if not isinstance(cls, type) or not _is_dataclass(cls):
            self.fault(where, f"{name!r} is no config class", "the dotted name of a dataclass")
            return None
        if fqn == "" and expected is not None and not issubclass(cls, expected):
            self.fault(where, f"{name!r} is no {expected.__qualname__}", f"{dotted_name(expected)} and its subclasses")
            return None
        return cls

    def value(self, data: Any, annotation: Any, fqn: str) -> Any:
        members = union_members(annotation)
        if isinstance(data, Mapping):
            return self._mapping(data, members, fqn)
        if isinstance(data, list):
            reading = sequence_reading(members)
            return reading.kind(self.value(item, reading.item(i), _join(fqn, i)) for i, item in enumerate(data))
        if isinstance(data, str):
            return self._string(data, members, fqn)
        if isinstance(data, int) and not isinstance(data, bool):
            enums = [member for member in members if isinstance(member, type) and issubclass(member, Enum)]
            if enums and not any(member in members for member in (int, float, Any)):
                return self._enum(enums[0], data, fqn)
        return data

    def _mapping(self, data: Mapping[str, Any], members: list[Any], fqn: str) -> Any:
        if TYPE_KEY in data:
            return self.node(data, fqn, None)
        if KIND_KEY in data:
            return self._tagged(data, members, fqn)
        types = mapping_types(members)
        nodes = [member for member in members if _is_dataclass(member)]
        if types is None and not is_wild(members) and nodes:
            if len(nodes) == 1:
                return self.node(data, fqn, nodes[0])
            self.fault(fqn, f"needs {TYPE_KEY!r}: it may be one of several classes", ", ".join(map(dotted_name, nodes)))
            return None
        key_type, value_type = types or (Any, Any)
        return {
            self.value(key, key_type, _join(fqn, key)): self.value(item, value_type, _join(fqn, key))
            for key, item in data.items()
        }

    def _tagged(self, data: Mapping[str, Any], members: list[Any], fqn: str) -> Any:
        kind, value = data[KIND_KEY], data.get("value")
        items = sequence_reading(members)
        match kind:
            case "plain":
                return value
            case "list" | "tuple" | "set" | "frozenset" if isinstance(value, list):
                make = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}[kind]
                return make(self.value(item, items.item(i), _join(fqn, i)) for i, item in enumerate(value))
            case "dict" if isinstance(value, list):
                key_type, value_type = mapping_types(members) or (Any, Any)
                return {
                    self.value(key, key_type, fqn): self.value(item, value_type, _join(fqn, key)) for key, item in value
                }
            case "enum" if isinstance(cls := self._named(data.get("class"), fqn), type) and issubclass(cls, Enum):
                return self._enum(cls, value, fqn)
            case "path" if isinstance(value, str):
                return self._string(value, [_path_class()], fqn)
            case "placement" if isinstance(value, str):
                return self._string(value, [Placement], fqn)
            case "callable":
                return self._named(value, fqn)
        if not self.faults:
            self.fault(_join(fqn, KIND_KEY), f"{dict(data)!r} is no value that a config writes")
        return None

    def _string(self, text: str, members: list[Any], fqn: str) -> Any:
        reading = string_reading(text, members)
        if reading is str:
            return text
        if reading is Placement:
            return self._placement(text, fqn)
        if reading is abc.Callable:
            return self._named(text, fqn)
        if issubclass(reading, Enum):
            return self._enum(reading, text, fqn)
        return reading(text)

    def _enum(self, cls: type[Enum], value: Any, fqn: str) -> Any:
        for member in cls:
            if value == member.value or value == member.name:
                return member
        near = nearest(str(value), [str(member.value) for member in cls])
        allowed = ", ".join(str(member.value) for member in cls)
        self.fault(fqn, f"{value!r} is no {cls.__qualname__}", allowed, f"did you mean {near!r}?" if near else None)
        return None

    def _placement(self, text: str, fqn: str) -> Any:
        match = _PLACEMENT.fullmatch(text.strip())
        if match is None:
            self.fault(fqn, f"{text!r} is no placement", _PLACEMENT_FORMS)
            return None
        from . import platform  # Loads the backend, which only a config with placements needs.

        shard, dim, replicate, _partial, reduce_op = match.groups()
        if shard:
            return platform.Shard(int(dim))
        return platform.Replicate() if replicate else platform.Partial(reduce_op)

    def _named(self, name: Any, fqn: str) -> Any:
        if not isinstance(name, str):
            self.fault(fqn, f"{name!r} is not the dotted name of a function or class")
            return None
        try:
            return resolve_name(name)
        except UnknownNameError as error:
            hint = f"did you mean {error.suggestion!r}?" if error.suggestion else None
            self.fault(fqn, f"{name!r} {error.problem}", hint=hint)
            return None


def _path_class() -> type:
    from pathlib import Path

    return Path


def _join(fqn: str, name: object) -> str:
    return f"{fqn}.{name}" if fqn else str(name)


def _is_node(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _is_dataclass(value: Any) -> bool:
    return isinstance(value, type) and dataclasses.is_dataclass(value)
