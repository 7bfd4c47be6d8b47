"""What a dataclass says about the types of its fields, as far as reading plain data needs it.

In: a dataclass, or one annotation. Out: the resolved annotation of each field, and for a value that may be one of
several types the one that plain data is read as. An annotation that cannot be resolved counts as `Any`.
"""

from __future__ import annotations

import collections.abc as abc
import dataclasses
import functools
import inspect
import pathlib
import sys
import types
import typing
from enum import Enum
from typing import Any

from .types import Placement

__all__ = [
    "SequenceReading",
    "field_annotations",
    "is_dataclass_type",
    "is_wild",
    "mapping_types",
    "sequence_reading",
    "string_reading",
    "union_members",
]


@functools.cache
def field_annotations(cls: Any) -> dict[str, Any]:
    """The annotation of each field of the dataclass, resolved in the module of the class that declares it."""
    found: dict[str, Any] = {}
    for klass in reversed(cls.__mro__):
        module = vars(sys.modules[klass.__module__]) if klass.__module__ in sys.modules else {}
        for name, annotation in inspect.get_annotations(klass).items():
            found[name] = _resolve(annotation, module, dict(vars(klass)))
    return {field.name: found.get(field.name, Any) for field in dataclasses.fields(cls)}


def _resolve(annotation: Any, module: dict[str, Any], namespace: dict[str, Any]) -> Any:
    if not isinstance(annotation, str):
        return annotation
    try:
        return eval(annotation, module, namespace)
    except Exception:
        # Names under TYPE_CHECKING or of an enclosing function. Values are then written with their kind.
        return Any


def union_members(annotation: Any) -> list[Any]:
    """The types that the annotation allows, unions and wrappers (Annotated, Final, type variables) taken apart."""
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        return [member for part in typing.get_args(annotation) for member in union_members(part)]
    if origin in (typing.Annotated, typing.Final):
        return union_members(typing.get_args(annotation)[0])
    if isinstance(annotation, typing.NewType):
        return union_members(annotation.__supertype__)
    if annotation is Any or annotation is object or isinstance(annotation, typing.TypeVar | str):
        return [Any]
    return [type(None) if annotation is None else annotation]


def is_wild(members: list[Any]) -> bool:
    """Whether the annotation says nothing."""
    return Any in members


@dataclasses.dataclass(frozen=True, slots=True)
class SequenceReading:
    """What a plain list is read as: `list`, `tuple`, `set` or `frozenset`, and the annotations of its items."""

    kind: type
    items: tuple[Any, ...]
    repeated: bool

    def item(self, index: int) -> Any:
        """The annotation of the item at `index`."""
        if self.repeated:
            return self.items[0]
        return self.items[index] if index < len(self.items) else Any


def sequence_reading(members: list[Any]) -> SequenceReading:
    """The first sequence type that the annotation allows, a list before all others."""
    for kinds in ((list, abc.Sequence, abc.MutableSequence, abc.Iterable, abc.Collection), (tuple,), (set, frozenset)):
        for member in members:
            origin = typing.get_origin(member) or member
            if origin not in kinds:
                continue
            args = typing.get_args(member)
            if origin is tuple and args and not (len(args) == 2 and args[1] is Ellipsis):
                return SequenceReading(tuple, args, repeated=False)
            kind = origin if origin in (tuple, set, frozenset) else list
            return SequenceReading(kind, (args[0],) if args else (Any,), repeated=True)
    return SequenceReading(list, (Any,), repeated=True)


def mapping_types(members: list[Any]) -> tuple[Any, Any] | None:
    """The annotations of keys and values of the first dict type that the annotation allows."""
    for member in members:
        if (typing.get_origin(member) or member) in (dict, abc.Mapping, abc.MutableMapping):
            return typing.get_args(member) or (Any, Any)
    return None


def string_reading(text: str, members: list[Any]) -> Any:
    """The type that a plain string is read as: `str`, an Enum class, `Placement`, `Path` or `Callable`."""
    literals = [value for member in members if typing.get_origin(member) is typing.Literal for value in member.__args__]
    if is_wild(members) or str in members or text in literals:
        return str
    for member in members:
        origin = typing.get_origin(member) or member
        if isinstance(origin, type) and issubclass(origin, Enum):
            return origin
        if isinstance(origin, type) and issubclass(origin, pathlib.PurePath):
            return origin
        if origin is Placement or _is_torch_placement(origin):
            return Placement
        if origin in (abc.Callable, type):
            return abc.Callable
    return str


def is_dataclass_type(value: Any) -> bool:
    """Whether this is a dataclass itself, not an instance of one."""
    return isinstance(value, type) and dataclasses.is_dataclass(value)


def _is_torch_placement(member: Any) -> bool:
    return getattr(member, "__module__", "").startswith("torch.") and getattr(member, "__name__", "") == "Placement"
