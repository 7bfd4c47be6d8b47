"""The parts of a config that the command line cannot set (the model above all), written for a reader of `--help`.

In: a trainer config. Out: an indented text; equal layers are written once with their count.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hp_config.fields import OFF_COMMAND_LINE, fields_of, is_node

__all__ = ["describe_hidden"]

# Said of every layer, these would bury the sizes that a reader looks for.
_NOT_SHOWN = OFF_COMMAND_LINE


def describe_hidden(config: Any) -> str:
    """The sections of `config` that are set by its recipe alone; empty if there are none."""
    lines: list[str] = []
    for info in fields_of(type(config)).values():
        value = getattr(config, info.name)
        if not info.on_command_line and is_node(value):
            lines += _describe(info.name, value, "  ")
    return "\n".join(["", "set by the recipe, not by options:", *lines, ""]) if lines else ""


def _describe(name: str, value: Any, indent: str) -> Iterator[str]:
    if is_node(value):
        yield f"{indent}{name}: {_class_name(value)}{_leaves(value)}"
        for field in dataclasses.fields(value):
            if field.name not in _NOT_SHOWN and _holds_nodes(getattr(value, field.name)):
                yield from _describe(field.name, getattr(value, field.name), indent + "  ")
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _describe(f"{name}.{key}", item, indent)
    else:
        for label, item in _group(value):
            yield from _describe(f"{name}.{label}", item, indent)


def _group(items: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Runs of items that read alike, as (`0` or `0-23`, the first of the run)."""
    texts = ["\n".join(_describe("", item, "")) for item in items]
    first = 0
    for index in range(1, len(items) + 1):
        if index == len(items) or texts[index] != texts[first]:
            yield (f"{first}-{index - 1}" if index - 1 > first else str(first)), items[first]
            first = index


def _leaves(node: Any) -> str:
    """The plain values of a node in one bracket, without those that are off."""
    shown = []
    for field in dataclasses.fields(node):
        value = getattr(node, field.name)
        if field.name in _NOT_SHOWN or value is None or _holds_nodes(value):
            continue
        shown.append(f"{field.name}={_short(value)}")
    return f"({', '.join(shown)})" if shown else ""


def _short(value: Any) -> str:
    if callable(value):
        return getattr(value, "__qualname__", type(value).__name__)
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "…"


def _holds_nodes(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(is_node(item) for item in value.values())
    if isinstance(value, list | tuple):
        return any(is_node(item) for item in value)
    return is_node(value)


def _class_name(node: Any) -> str:
    """`GQAttention` for a `GQAttention.Config`."""
    return type(node).__qualname__.removesuffix(".Config").rpartition(".")[2]
