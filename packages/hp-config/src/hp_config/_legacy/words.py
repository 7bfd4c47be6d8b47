"""The words behind an older YAML: its spellings of booleans, and single keys of a mapping.

In: `--dot.path=value` words. Out: the same in the words of the shared reader, and the mappings' keys apart.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from hp_config.coerce import coerce
from hp_config.flags import FlagReading
from hp_config.tree import Option, find_options, replace_at
from hp_protocols.errors import ConfigError

__all__ = ["BOOLEANS", "as_number", "older_words", "set_items", "split_items"]

T = TypeVar("T")

BOOLEANS = {"y": True, "t": True, "n": False, "f": False}
"""Spellings of booleans that the older reader knew beyond ours."""

MAPPINGS: Mapping[str, Any] = {"model.config_overrides": Any, "model.tp_plan": str}
"""Keys that hold a mapping, and the type of its values: `--model.config_overrides.head_dim=32` sets one of them."""


_EXPONENT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")


def as_number(value: Any) -> Any:
    """A number that YAML 1.1 reads as text, such as 1e-5; anything else as it is."""
    return float(value) if isinstance(value, str) and _EXPONENT.fullmatch(value) else value


def older_words(words: Sequence[str], config: Any) -> list[str]:
    """`--a.b=y` and `--a.b y` as `--a.b=true`."""
    options = find_options(config)
    found: list[str] = []
    left = list(words)
    while left:
        name, equals, value = left.pop(0).partition("=")
        boolean = _is_boolean(options.get(name.removeprefix("--").replace("-", "_")))
        if boolean and not equals and left and left[0].lower() in BOOLEANS:
            equals, value = "=", left.pop(0)
        if boolean and value.lower() in BOOLEANS:
            value = str(BOOLEANS[value.lower()]).lower()
        found.append(f"{name}{equals}{value}")
    return found


def _is_boolean(option: Option | None) -> bool:
    return option is not None and option.annotation is bool


def split_items(words: Sequence[str]) -> tuple[list[str], list[tuple[str, str, str]]]:
    """The words for the shared reader, and (mapping, key, value) of those that set one key of a mapping."""
    rest, items, left = list[str](), list[tuple[str, str, str]](), list(words)
    while left:
        word = left.pop(0)
        name, equals, value = word.partition("=")
        path = next((path for path in MAPPINGS if name.startswith(f"--{path}.")), None)
        # A key without a value is left to the shared reader, which refuses it.
        if path is None or (not equals and (not left or left[0].startswith("--"))):
            rest.append(word)
            continue
        items.append((path, name.removeprefix(f"--{path}."), value if equals else left.pop(0)))
    return rest, items


def set_items(config: T, items: Sequence[tuple[str, str, str]], flags: FlagReading) -> T:
    """`config` with single keys of its mappings set; faults, and what was set, are added to `flags`."""
    for path in MAPPINGS.keys() & flags.values.keys():
        if flags.values[path]:
            flags.values[path] = {key: as_number(value) for key, value in flags.values[path].items()}
            config = replace_at(config, {path: flags.values[path]})
    for path, key, text in items:
        section, _, name = path.partition(".")
        try:
            value = coerce(MAPPINGS[path], text, f"--{path}.{key}", text=True)
        except ConfigError as error:
            flags.faults += error.faults
            continue
        before = getattr(getattr(config, section), name) or {}
        flags.values[path] = {**before, key: as_number(value)}
        config = replace_at(config, {path: flags.values[path]})
    return config
