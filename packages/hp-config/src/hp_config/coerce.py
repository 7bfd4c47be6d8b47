"""One strict reading of values: what a YAML file or a command line holds becomes what a field declares.

In: an annotation, a raw value (YAML's types, or text from a command line) and the place it came from.
Out: a value of the declared type, or a `ConfigError` with one `Fault` per mistake inside the value.
"""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml

from hp_config.annotations import (
    LIST_TYPES,
    MAPPING_TYPES,
    conforms,
    describe,
    is_supported,
    same_value,
    show,
    strip_annotated,
    union_members,
)
from hp_protocols.errors import ConfigError, Fault, nearest

__all__ = ["coerce"]

TRUE_WORDS = frozenset({"true", "yes", "on", "1"})
FALSE_WORDS = frozenset({"false", "no", "off", "0"})
NULL_WORDS = frozenset({"none", "null"})

_INTEGER = re.compile(r"[-+]?\d+(_\d+)*")


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
    if len(union_members(annotation)) > 1:
        return _coerce_union(annotation, raw, where, text)
    if origin is Literal:
        return _coerce_literal(annotation, raw, where)
    container = origin or annotation
    if container in LIST_TYPES:
        return _coerce_sequence(annotation, raw, where, text)
    if container in MAPPING_TYPES:
        return _coerce_mapping(annotation, raw, where, text)
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return _coerce_enum(annotation, raw, where)
    reader = _SCALARS.get(annotation)
    if reader is None:
        raise TypeError(f"{where}: no reading is defined for the annotation {annotation!r}")
    return reader(raw, where, text)


def _wrong(annotation: Any, raw: Any, where: str, hint: str | None = None) -> ConfigError:
    return ConfigError(Fault(where, f"expected {describe(annotation)}, got {show(raw)}", hint=hint))


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


def _coerce_literal(annotation: Any, raw: Any, where: str) -> Any:
    members = get_args(annotation)
    for member in members:
        if same_value(raw, member):
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
        if raw is member or same_value(raw, member.value) or raw in (member.name, str(member.value)):
            return member
    guess = nearest(str(raw), [str(member.value) for member in annotation])
    raise _wrong(annotation, raw, where, hint=f"did you mean {guess}?" if guess else None)


def _coerce_union(annotation: Any, raw: Any, where: str, text: bool) -> Any:
    members = union_members(annotation)
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
    if member is type(None):
        return 0
    if member is str:
        return 2
    container = get_origin(member) or member
    if container in (*LIST_TYPES, *MAPPING_TYPES):
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
