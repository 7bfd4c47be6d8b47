"""A config seen as a tree of paths: which options it has, what stands where, and a copy with some values changed.

In: a trainer config (any tree of dataclasses). Out: `Option`s by dotted path, leaves by path, changed copies.
The type of a section is the type of the value that stands there, so a subclass's fields are options too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hp_config.fields import fields_of, is_node
from hp_protocols.errors import ConfigError, Fault

__all__ = ["Option", "find_nodes", "find_options", "find_refused", "join_path", "replace_at"]


@dataclasses.dataclass(frozen=True, slots=True)
class Option:
    """One value that the command line can set: where it stands, what it takes, what it is now."""

    path: str
    annotation: Any
    value: Any
    owner: type

    @property
    def flag(self) -> str:
        """The option as it is typed."""
        return f"--{self.path}"

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rpartition(".")[2]


def join_path(path: str, name: str | int) -> str:
    """`training` + `steps` → `training.steps`; the root's path is empty."""
    return f"{path}.{name}" if path else str(name)


def find_options(config: Any) -> dict[str, Option]:
    """All options of a config by path, sections in the order of their declaration."""
    options: dict[str, Option] = {}
    for path, node in find_nodes(config, command_line_only=True):
        for info in fields_of(type(node)).values():
            value = getattr(node, info.name)
            if info.on_command_line and info.readable and not is_node(value):
                option = Option(join_path(path, info.name), info.annotation, value, type(node))
                options[option.path] = option
    return options


def find_refused(config: Any) -> dict[str, str]:
    """Paths that exist but are not options, with the reason in a reader's words."""
    refused: dict[str, str] = {}
    for path, node in find_nodes(config, command_line_only=True):
        for info in fields_of(type(node)).values():
            value, full = getattr(node, info.name), join_path(path, info.name)
            if not info.on_command_line:
                refused[full] = "is set by the recipe, not on the command line"
            elif is_node(value):
                refused[full] = "is a section, not a value"
            elif not info.readable:
                refused[full] = "cannot be written as text; set it in a recipe or in a YAML"
    return refused


def find_nodes(config: Any, *, command_line_only: bool = False, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every config node with its path, parents first; containers are entered unless only options are asked for."""
    yield path, config
    for info in fields_of(type(config)).values():
        if command_line_only and not info.on_command_line:
            continue
        value, full = getattr(config, info.name), join_path(path, info.name)
        if is_node(value):
            yield from find_nodes(value, command_line_only=command_line_only, path=full)
        elif not command_line_only:
            yield from _nodes_in_container(value, full)


def _nodes_in_container(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        items: Iterator[tuple[Any, Any]] = iter(value.items())
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        items = iter(enumerate(value))
    else:
        return
    for key, item in items:
        if is_node(item):
            yield from find_nodes(item, path=join_path(path, key))
        else:
            yield from _nodes_in_container(item, join_path(path, key))


def replace_at(config: Any, changes: Mapping[str, Any]) -> Any:
    """A copy of `config` with the values at some dotted paths replaced; `config` itself is left alone.

    Raises:
        ConfigError: a config's own `__post_init__` refuses the new values (it raises ValueError).
    """
    return _replace_below(config, "", changes)


def _replace_below(node: Any, path: str, changes: Mapping[str, Any]) -> Any:
    own: dict[str, Any] = {}
    below: dict[str, dict[str, Any]] = {}
    for change, value in changes.items():
        head, _, rest = change.partition(".")
        if rest:
            below.setdefault(head, {})[rest] = value
        else:
            own[head] = value
    faults: list[Fault] = []
    for name, deeper in below.items():
        try:
            own[name] = _replace_below(getattr(node, name), join_path(path, name), deeper)
        except ConfigError as error:
            faults.extend(error.faults)
    if faults:
        raise ConfigError(faults)
    if not own:
        return node
    try:
        return dataclasses.replace(node, **own)
    except ConfigError:
        raise
    except ValueError as error:
        # The class checks its own values; the user gave them, so the user gets a message and not a traceback.
        given = ", ".join(join_path(path, name) for name in own)
        raise ConfigError(Fault(given, str(error))) from error
