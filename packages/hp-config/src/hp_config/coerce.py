"""One strict reading of values: what a YAML file or a command line holds becomes what a field declares.

In: an annotation, a raw value (YAML's types, or text from a command line) and the place it came from.
Out: a value of the declared type, or a `ConfigError` with one `Fault` per mistake inside the value.
"""

from __future__ import annotations

import enum
import math
import re
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import yaml

from hp_protocols.errors import ConfigError, Fault, nearest

__all__ = ["coerce", "conforms", "container_kind", "describe", "is_supported", "show", "strip_annotated"]

TRUE_WORDS = frozenset({"true", "yes", "on", "1"})
FALSE_WORDS = frozenset({"false", "no", "off", "0"})
NULL_WORDS = frozenset({"none", "null"})

_INTEGER = re.compile(r"[-+]?\d+(_\d+)*")
_LISTS = (list, Sequence, Iterable, tuple, set, frozenset)
_DICTS = (dict, Mapping)
_PLURALS = {
    "an integer": "integers",
    "a number": "numbers",
    "text": "texts",
    "true or false": "booleans",
    "a path": "paths",
    "anything": "anything",
}


def coerce(annotation: Any, raw: Any, where: str, *, text: bool = False) -> Any:
    """`raw` as a value of type `annotation`.

    Args:
        annotation: int, float, bool, str, None, Path, Any, Literal, an Enum, Union / Optional, and list, tuple,
            set and dict of these.
        raw: plain data as YAML gives it, or text. Text is read as a number, a boolean or a literal where one is
            declared, so `"1e-4"` (which YAML 1.1 leaves a string) is a number in a float field.
        where: the place as the user knows it; it opens every fault.
        text: `raw` comes from a command line: `none` is null where null is allowed, and a container may be
            written `a,b,c`, `[a, b]`, `k=v,…` or `{k: v}`.

    Raises:
        ConfigError: `raw` is not such a value; one fault per wrong item.
        TypeError: `annotation` is none of the above, a mistake of the program (see `is_supported`).
    """
    annotation = strip_annotated(annotation)
    if annotation is Any:
        return _parse_flow(raw, where) if text and isinstance(raw, str) else raw
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        return _coerce_union(annotation, raw, where, text)
    if origin is Literal:
        return _coerce_literal(annotation, raw, where)
    container = origin or annotation
    if container in _LISTS:
        return _coerce_sequence(annotation, raw, where, text)
    if container in _DICTS:
        return _coerce_mapping(annotation, raw, where, text)
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return _coerce_enum(annotation, raw, where)
    reader = _SCALARS.get(annotation)
    if reader is None:
        raise TypeError(f"{where}: no reading is defined for the annotation {annotation!r}")
    return reader(raw, where, text)


def is_supported(annotation: Any) -> bool:
    """Whether `coerce` can read values of this annotation."""
    annotation = strip_annotated(annotation)
    origin = get_origin(annotation)
    if annotation is Any or origin is Literal or annotation in _SCALARS:
        return True
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return True
    container = origin or annotation
    if origin in (Union, types.UnionType) or container in (*_LISTS, *_DICTS):
        return all(is_supported(argument) for argument in get_args(annotation) if argument is not Ellipsis)
    return False


def conforms(annotation: Any, value: Any) -> bool:
    """Whether `value` already is of type `annotation`, with nothing to convert but an int in a float field."""
    annotation = strip_annotated(annotation)
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation is Any:
        return True
    if origin in (Union, types.UnionType):
        return any(conforms(member, value) for member in arguments)
    if origin is Literal:
        return any(_same(value, member) for member in arguments)
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
    if container in _LISTS:
        kind = container if container in (list, set, frozenset) else (list, tuple)
        return isinstance(value, kind) and all(conforms(arguments[0], item) for item in value if arguments)
    if container in _DICTS:
        key, item = arguments or (Any, Any)
        return isinstance(value, Mapping) and all(conforms(key, k) and conforms(item, v) for k, v in value.items())
    return isinstance(value, annotation)


def describe(annotation: Any) -> str:
    """The type in a reader's words: `an integer`, `one of none, blocks, graph`, `a list of numbers`."""
    annotation = strip_annotated(annotation)
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation in _NAMES:
        return _NAMES[annotation]
    if origin is Literal:
        return "one of " + ", ".join(map(str, arguments)) if len(arguments) > 1 else str(arguments[0])
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(describe(member) for member in arguments))
    container = origin or annotation
    if container is tuple and arguments and arguments[-1] is not Ellipsis:
        return f"{len(arguments)} values ({', '.join(describe(item) for item in arguments)})"
    if container in _LISTS:
        return f"a list of {_plural(describe(arguments[0]))}" if arguments else "a list"
    if container in _DICTS:
        return f"a mapping from {describe(arguments[0])} to {describe(arguments[1])}" if arguments else "a mapping"
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return "one of " + ", ".join(str(member.value) for member in annotation)
    return getattr(annotation, "__qualname__", str(annotation))


def container_kind(annotation: Any) -> type | None:
    """list or dict where values are containers (null aside), None where they are scalars."""
    annotation = strip_annotated(annotation)
    members = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
    for member in map(strip_annotated, members):
        container = get_origin(member) or member
        if container in _LISTS or container in _DICTS:
            return dict if container in _DICTS else list
    return None


def strip_annotated(annotation: Any) -> Any:
    """`annotation` without `Annotated[…]` and its extras, and without ClassVar-like wrappers of one argument."""
    while hasattr(annotation, "__metadata__"):
        annotation = annotation.__origin__
    # `type Name = …` aliases of Python 3.12 carry what they stand for.
    return getattr(annotation, "__value__", annotation)


def _wrong(annotation: Any, raw: Any, where: str, hint: str | None = None) -> ConfigError:
    return ConfigError(Fault(where, f"expected {describe(annotation)}, got {show(raw)}", hint=hint))


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


def _coerce_int(raw: Any, where: str, text: bool) -> int:
    if type(raw) is int:
        return raw
    if isinstance(raw, str) and _INTEGER.fullmatch(raw.strip()):
        return int(raw)
    number = _as_float(raw)
    if number is not None and math.isfinite(number) and number == int(number):
        raise _wrong(int, raw, where, hint=f"write {int(number)}")
    raise _wrong(int, raw, where)


def _coerce_float(raw: Any, where: str, text: bool) -> float:
    number = _as_float(raw)
    if number is None:
        raise _wrong(float, raw, where)
    return number


def _as_float(raw: Any) -> float | None:
    if type(raw) in (int, float):
        return float(raw)
    if isinstance(raw, str):
        try:
            # YAML spells infinity .inf, Python inf.
            return float(re.sub(r"^([-+]?)\.(inf|nan)$", r"\1\2", raw.strip().lower()))
        except ValueError:
            return None
    return None


def _coerce_bool(raw: Any, where: str, text: bool) -> bool:
    word = str(raw).strip().lower() if isinstance(raw, bool | int | str) else None
    if word in TRUE_WORDS:
        return True
    if word in FALSE_WORDS:
        return False
    raise _wrong(bool, raw, where, hint="also yes, no, on, off, 1, 0")


def _coerce_str(raw: Any, where: str, text: bool) -> str:
    if isinstance(raw, str):
        return raw
    hint = None
    if isinstance(raw, bool):
        hint = "YAML reads an unquoted on, off, yes, no, true, false as a boolean: put the text in quotes"
    elif raw is not None and not isinstance(raw, Mapping | list):
        hint = f'put it in quotes: "{raw}"'
    raise _wrong(str, raw, where, hint=hint)


def _coerce_none(raw: Any, where: str, text: bool) -> None:
    if raw is None or (text and isinstance(raw, str) and raw.strip().lower() in NULL_WORDS):
        return
    raise _wrong(None, raw, where)


def _coerce_path(raw: Any, where: str, text: bool) -> Path:
    if isinstance(raw, Path):
        return raw
    return Path(_coerce_str(raw, where, text))


_Reader = Callable[[Any, str, bool], Any]
_SCALARS: dict[Any, _Reader] = {
    int: _coerce_int,
    float: _coerce_float,
    bool: _coerce_bool,
    str: _coerce_str,
    None: _coerce_none,
    type(None): _coerce_none,
    Path: _coerce_path,
}
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


def _coerce_literal(annotation: Any, raw: Any, where: str) -> Any:
    members = get_args(annotation)
    for member in members:
        if _same(raw, member):
            return member
    if isinstance(raw, str):
        by_text = {str(member): member for member in members}
        if raw in by_text:
            return by_text[raw]
        guess = nearest(raw, by_text)
        raise _wrong(annotation, raw, where, hint=f"did you mean {guess}?" if guess else None)
    quote = isinstance(raw, bool) and any(str(m).lower() in TRUE_WORDS | FALSE_WORDS for m in members)
    raise _wrong(annotation, raw, where, hint="put the word in quotes: YAML reads it as a boolean" if quote else None)


def _coerce_enum(annotation: type[enum.Enum], raw: Any, where: str) -> enum.Enum:
    for member in annotation:
        if raw is member or _same(raw, member.value) or raw in (member.name, str(member.value)):
            return member
    guess = nearest(str(raw), [str(member.value) for member in annotation])
    raise _wrong(annotation, raw, where, hint=f"did you mean {guess}?" if guess else None)


def _coerce_union(annotation: Any, raw: Any, where: str, text: bool) -> Any:
    members = get_args(annotation)
    if not isinstance(raw, str):
        # A value that already fits keeps its type: 1 stays an integer in `float | int`.
        for member in members:
            if conforms(member, raw) and (member is not float or isinstance(raw, float)):
                return coerce(member, raw, where, text=text)
    elif not text and str in members:
        if type(None) in members and raw in ("None", "none"):
            raise _wrong(annotation, raw, where, hint=f"YAML writes nothing as null (and the path as ./{raw})")
        return raw
    closest: ConfigError | None = None
    for member in sorted(members, key=lambda member: _reading_order(member, raw)):
        if not is_supported(member):
            continue
        try:
            return coerce(member, raw, where, text=text)
        except ConfigError as error:
            # With one member besides null its own words (which item, nearest name) say more than the union's.
            if member is not type(None):
                closest = error if closest is None else _wrong(annotation, raw, where)
    if closest is None:
        raise _wrong(annotation, raw, where)
    if len(members) == 2 and type(None) in members and len(closest.faults) == 1 and closest.faults[0].where == where:
        raise ConfigError(
            Fault(where, f"expected {describe(annotation)}, got {show(raw)}", hint=closest.faults[0].hint)
        )
    raise closest


def _reading_order(member: Any, raw: Any) -> int:
    """Null first, then numbers, booleans and literals, then containers, and text last, since it takes anything."""
    member = strip_annotated(member)
    if member is type(None):
        return 0
    if member is str:
        return 2
    container = get_origin(member) or member
    if container in (*_LISTS, *_DICTS):
        bracketed = isinstance(raw, str) and raw.lstrip().startswith(("[", "{"))
        return 1 if bracketed or not isinstance(raw, str) else 3
    return 1


def _coerce_sequence(annotation: Any, raw: Any, where: str, text: bool) -> Any:
    container, arguments = get_origin(annotation) or annotation, get_args(annotation)
    if text and isinstance(raw, str):
        raw = _split_list(raw, where)
    if not isinstance(raw, list | tuple | set | frozenset):
        raise _wrong(annotation, raw, where)
    items = list(raw)
    if container is tuple and arguments and arguments[-1] is not Ellipsis:
        if len(items) != len(arguments):
            raise _wrong(annotation, items, where)
        declared: Sequence[Any] = arguments
    else:
        declared = [arguments[0] if arguments else Any] * len(items)
    places = [f"{where}[{index}]" for index in range(len(items))]
    values = _coerce_each(zip(declared, items, places, strict=True), text)
    return container(values) if container in (tuple, set, frozenset) else values


def _coerce_mapping(annotation: Any, raw: Any, where: str, text: bool) -> dict[Any, Any]:
    key_type, item_type = get_args(annotation) or (Any, Any)
    if text and isinstance(raw, str):
        raw = _split_mapping(raw, where)
    if not isinstance(raw, Mapping):
        raise _wrong(annotation, raw, where)
    places = [f"{where}[{key}]" for key in raw]
    keys = _coerce_each([(key_type, key, place) for key, place in zip(raw, places, strict=True)], text)
    items = _coerce_each([(item_type, item, place) for item, place in zip(raw.values(), places, strict=True)], text)
    return dict(zip(keys, items, strict=True))


def _coerce_each(parts: Iterable[tuple[Any, Any, str]], text: bool) -> list[Any]:
    """The values of all `(annotation, raw, place)`, or one ConfigError with the faults of all."""
    values: list[Any] = []
    faults: list[Fault] = []
    for annotation, raw, where in parts:
        try:
            values.append(coerce(annotation, raw, where, text=text))
        except ConfigError as error:
            faults.extend(error.faults)
    if faults:
        raise ConfigError(faults)
    return values


def _split_list(raw: str, where: str) -> list[Any]:
    stripped = raw.strip()
    if stripped.startswith(("[", "(")):
        inner = stripped.replace("(", "[", 1)[:-1] + "]" if stripped.startswith("(") else stripped
        items = _parse_flow(inner, where)
        if isinstance(items, list):
            return items
        raise _wrong(list, raw, where)
    return [item.strip() for item in stripped.split(",")] if stripped else []


def _split_mapping(raw: str, where: str) -> dict[Any, Any]:
    stripped = raw.strip()
    if stripped.startswith("{"):
        items = _parse_flow(stripped, where)
        if isinstance(items, dict):
            return items
        raise _wrong(dict, raw, where)
    pairs = [pair.partition("=") for pair in stripped.split(",")] if stripped else []
    if any(not equals for _, equals, _ in pairs):
        raise _wrong(dict, raw, where, hint="write key=value,key=value or {key: value}")
    return {key.strip(): value.strip() for key, _, value in pairs}


def _parse_flow(raw: str, where: str) -> Any:
    try:
        return yaml.safe_load(raw)
    except yaml.YAMLError as error:
        reason = getattr(error, "problem", None) or str(error)
        raise ConfigError(Fault(where, f"{raw!r} cannot be read: {reason}")) from error


def _same(value: Any, member: Any) -> bool:
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
