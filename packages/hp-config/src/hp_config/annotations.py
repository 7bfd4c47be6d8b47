"""What an annotation allows, in words and as a test; the one list of types that a config's leaves may have.

In: an annotation, and perhaps a value. Out: whether the value conforms, whether values can be read from text, and how
to name the type to a reader.
"""

from __future__ import annotations

import enum
import types
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

__all__ = [
    "LIST_TYPES",
    "MAPPING_TYPES",
    "conforms",
    "container_kind",
    "describe",
    "is_supported",
    "same_value",
    "show",
    "strip_annotated",
    "union_members",
]

# The containers that a field may hold, by how they are written.
LIST_TYPES = (list, Sequence, Iterable, tuple, set, frozenset)
MAPPING_TYPES = (dict, Mapping)
# The scalars that a field may hold, by how a reader calls them.
_NAMES: dict[Any, str] = {
    Any: "anything",
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "text",
    None: "null",
    type(None): "null",
    Path: "a path",
}
_UNIONS = (Union, types.UnionType)
_PLURALS = {
    "an integer": "integers",
    "a number": "numbers",
    "text": "texts",
    "true or false": "booleans",
    "a path": "paths",
    "anything": "anything",
}


def strip_annotated(annotation: Any) -> Any:
    """`annotation` without `Annotated[…]` and its extras, and without ClassVar-like wrappers of one argument."""
    while hasattr(annotation, "__metadata__"):
        annotation = annotation.__origin__
    # `type Name = …` aliases of Python 3.12 carry what they stand for.
    return getattr(annotation, "__value__", annotation)


def union_members(annotation: Any) -> tuple[Any, ...]:
    """The members of a union; of anything else, itself."""
    annotation = strip_annotated(annotation)
    if get_origin(annotation) not in _UNIONS:
        return (annotation,)
    return tuple(map(strip_annotated, get_args(annotation)))


def is_supported(annotation: Any) -> bool:
    """Whether `coerce` can read values of this annotation."""
    annotation = strip_annotated(annotation)
    origin = get_origin(annotation)
    if annotation is Any or origin is Literal or annotation in _NAMES:
        return True
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return True
    if origin in _UNIONS or (origin or annotation) in (*LIST_TYPES, *MAPPING_TYPES):
        return all(is_supported(argument) for argument in get_args(annotation) if argument is not Ellipsis)
    return False


def conforms(annotation: Any, value: Any) -> bool:
    """Whether `value` already is of type `annotation`, with nothing to convert but an int in a float field."""
    annotation = strip_annotated(annotation)
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation is Any:
        return True
    if origin in _UNIONS:
        return any(conforms(member, value) for member in arguments)
    if origin is Literal:
        return any(same_value(value, member) for member in arguments)
    if annotation is None or annotation is type(None):
        return value is None
    if annotation is float:
        return type(value) in (float, int)
    if annotation in (int, bool, str):
        # bool is an int to Python, not to a reader of a config.
        return isinstance(value, annotation) and (annotation is bool or not isinstance(value, bool))
    container = origin or annotation
    if container is tuple:
        return isinstance(value, tuple) and _tuple_conforms(arguments, value)
    if container in LIST_TYPES:
        kind = container if container in (list, set, frozenset) else (list, tuple)
        return isinstance(value, kind) and all(conforms(arguments[0], item) for item in value if arguments)
    if container in MAPPING_TYPES:
        key, item = arguments or (Any, Any)
        return isinstance(value, Mapping) and all(conforms(key, k) and conforms(item, v) for k, v in value.items())
    return isinstance(value, annotation)


def container_kind(annotation: Any) -> type | None:
    """list or dict where values are containers (null aside), None where they are scalars."""
    for member in union_members(annotation):
        container = get_origin(member) or member
        if container in LIST_TYPES or container in MAPPING_TYPES:
            return dict if container in MAPPING_TYPES else list
    return None


def describe(annotation: Any) -> str:
    """The type in a reader's words: `an integer`, `one of none, blocks, graph`, `a list of numbers`."""
    annotation = strip_annotated(annotation)
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation in _NAMES:
        return _NAMES[annotation]
    if origin is Literal:
        return "one of " + ", ".join(map(str, arguments)) if len(arguments) > 1 else str(arguments[0])
    if origin in _UNIONS:
        return " or ".join(dict.fromkeys(describe(member) for member in arguments))
    container = origin or annotation
    if container is tuple and arguments and arguments[-1] is not Ellipsis:
        return f"{len(arguments)} values ({', '.join(describe(item) for item in arguments)})"
    if container in LIST_TYPES:
        return f"a list of {_plural(describe(arguments[0]))}" if arguments else "a list"
    if container in MAPPING_TYPES:
        return f"a mapping from {describe(arguments[0])} to {describe(arguments[1])}" if arguments else "a mapping"
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return "one of " + ", ".join(str(member.value) for member in annotation)
    return getattr(annotation, "__qualname__", str(annotation))


def show(raw: Any) -> str:
    """A raw value and its kind in a reader's words: `the text 'ten'`, `the number 1.5`, `null`."""
    if raw is None:
        return "null"
    if isinstance(raw, bool):
        return f"the boolean {str(raw).lower()}"
    if isinstance(raw, str):
        return f"the text {raw!r}"
    if isinstance(raw, int | float):
        return f"the number {raw!r}"
    if isinstance(raw, Mapping):
        return f"a mapping with the keys {', '.join(map(str, raw))}" if raw else "an empty mapping"
    if isinstance(raw, list | tuple):
        return f"the list {list(raw)!r}"
    return f"{raw!r} ({type(raw).__name__})"


def same_value(value: Any, member: Any) -> bool:
    """Equality that tells 1 from True."""
    return value == member and isinstance(value, bool) == isinstance(member, bool)


def _tuple_conforms(arguments: Sequence[Any], value: tuple[Any, ...]) -> bool:
    if not arguments:
        return True
    if arguments[-1] is Ellipsis:
        return all(conforms(arguments[0], item) for item in value)
    return len(arguments) == len(value) and all(map(conforms, arguments, value))


def _plural(words: str) -> str:
    return _PLURALS.get(words, f"({words})")
