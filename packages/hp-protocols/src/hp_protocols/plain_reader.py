"""Reading plain data as config trees, by the annotations of the fields.

In: what `to_plain` wrote, or a hand-written part of it. Out: the tree, or all faults of the data, each with its place.
Whether a number or string fits its field is not checked here. Torch-free unless the data holds placements.
"""

from __future__ import annotations

import collections.abc as abc
import dataclasses
import re
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from .annotations import (
    field_annotations,
    is_dataclass_type,
    is_wild,
    mapping_types,
    sequence_reading,
    string_reading,
    union_members,
)
from .errors import ConfigError, Fault, nearest
from .references import UnknownNameError, dotted_name, resolve_name
from .traversal import join_fqn
from .types import Placement

__all__ = ["KIND_KEY", "PLACEMENT_FORMS", "TYPE_KEY", "PlainReader"]

TYPE_KEY = "_type"
"""The key of a node's class, a dotted name."""

KIND_KEY = "_kind"
"""The key of a value's kind, where the field's annotation does not tell it: `{"_kind": "tuple", "value": [1, 2]}`."""

PLACEMENT_FORMS = "Shard(dim), Replicate(), Partial(sum)"
_PLACEMENT = re.compile(r"(Shard)\((-?\d+)\)|(Replicate)\(\)|(Partial)\((\w+)\)")


class PlainReader:
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
                    join_fqn(fqn, key),
                    f"unknown key of {cls.__qualname__}",
                    ", ".join(annotations) or "none",
                    f"did you mean {near!r}?" if near else None,
                )
                continue
            values[key] = self.value(item, annotations[key], join_fqn(fqn, key))
        complete = not hasattr(cls, "from_plain_fields") and self._check_required(cls, values, data, fqn)
        return None if self.faults else self._construct(cls, values, fqn, complete)

    def _check_required(self, cls: Any, values: dict[str, Any], data: Mapping[str, Any], fqn: str) -> bool:
        """Note the fields that are missing; whether every field of the class was given."""
        fields = dataclasses.fields(cls)
        for field in fields:
            has_default = field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
            if field.init and not has_default and field.name not in data:
                self.fault(join_fqn(fqn, field.name), f"missing; {cls.__qualname__} needs it")
        return all(field.name in values for field in fields)

    def _construct(self, cls: Any, values: dict[str, Any], fqn: str, complete: bool) -> Any:
        try:
            if hasattr(cls, "from_plain_fields"):
                return cls.from_plain_fields(values)
            init = {field.name for field in dataclasses.fields(cls) if field.init}
            node = cls(**{name: value for name, value in values.items() if name in init})
        except ConfigError as error:
            prefix = f"{fqn}: " if fqn else ""
            self.faults += [dataclasses.replace(fault, where=prefix + fault.where) for fault in error.faults]
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
        where = join_fqn(fqn, TYPE_KEY)
        if TYPE_KEY not in data:
            return expected
        name = data[TYPE_KEY]
        try:
            cls = resolve_name(name) if isinstance(name, str) else None
        except UnknownNameError as error:
            hint = f"did you mean {error.suggestion!r}?" if error.suggestion else None
            self.fault(where, f"{name!r} {error.problem}", hint=hint)
            return None
        if not isinstance(cls, type) or not is_dataclass_type(cls):
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
            return reading.kind(self.value(item, reading.item(i), join_fqn(fqn, i)) for i, item in enumerate(data))
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
        nodes = [member for member in members if is_dataclass_type(member)]
        if types is None and not is_wild(members) and nodes:
            if len(nodes) == 1:
                return self.node(data, fqn, nodes[0])
            self.fault(fqn, f"needs {TYPE_KEY!r}: it may be one of several classes", ", ".join(map(dotted_name, nodes)))
            return None
        key_type, value_type = types or (Any, Any)
        return {
            self.value(key, key_type, join_fqn(fqn, key)): self.value(item, value_type, join_fqn(fqn, key))
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
                return make(self.value(item, items.item(i), join_fqn(fqn, i)) for i, item in enumerate(value))
            case "dict" if isinstance(value, list):
                key_type, value_type = mapping_types(members) or (Any, Any)
                return {
                    self.value(key, key_type, fqn): self.value(item, value_type, join_fqn(fqn, key))
                    for key, item in value
                }
            case "enum" if isinstance(cls := self._named(data.get("class"), fqn), type) and issubclass(cls, Enum):
                return self._enum(cls, value, fqn)
            case "path" if isinstance(value, str):
                return self._string(value, [Path], fqn)
            case "placement" if isinstance(value, str):
                return self._string(value, [Placement], fqn)
            case "callable":
                return self._named(value, fqn)
        if not self.faults:
            self.fault(join_fqn(fqn, KIND_KEY), f"{dict(data)!r} is no value that a config writes")
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
            self.fault(fqn, f"{text!r} is no placement", PLACEMENT_FORMS)
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
