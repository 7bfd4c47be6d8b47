"""A YAML file as plain data that remembers its lines, so that a fault can say where it stands.

In: a path. Out: a `Document`. Duplicate keys, which YAML parsers usually drop in silence, are faults here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hp_protocols.errors import ConfigError, Fault

__all__ = ["FORMAT_KEY", "RESOLVED_NAME", "Document", "read_document"]

FORMAT_KEY = "hp_config"
"""The first key of a trainer's file; the older trainer's has none."""

RESOLVED_NAME = "resolved.yaml"
"""The file in a run's folder that holds its configuration."""


@dataclass(frozen=True, slots=True)
class Document:
    """A YAML file's content.

    Attributes:
        path: the file, as the user named it.
        data: what it holds, as `yaml.safe_load` gives it.
        lines: dotted path → line, counted from 1; list items as `a.0`.
    """

    path: Path
    data: Any
    lines: Mapping[str, int]

    def place(self, path: str) -> str:
        """Where a dotted path stands: `run/resolved.yaml:12`; for a missing key the line of what should hold it."""
        near = path.replace("[", ".").replace("]", "")
        while near and near not in self.lines:
            near = near.rpartition(".")[0]
        return f"{self.path}:{self.lines.get(near, 1)}"


def read_document(path: Path) -> Document:
    """Read a YAML file, or the resolved configuration of a run's folder.

    Raises:
        ConfigError: there is no such file, it is not YAML, or a key stands twice in one mapping.
    """
    if path.is_dir():
        path = path / RESOLVED_NAME
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(Fault(str(path), "there is no such file", allowed="a YAML file or a run's folder")) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(Fault(str(path), f"cannot be read: {error}")) from error
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        lines: dict[str, int] = {}
        faults: list[Fault] = []
        if node is not None:
            _note_lines(node, "", path, lines, faults)
        if faults:
            raise ConfigError(faults)
        data = None if node is None else loader.construct_document(node)
    except yaml.YAMLError as error:
        raise ConfigError(_syntax_fault(path, error)) from error
    finally:
        loader.dispose()
    return Document(path, data, lines)


def _note_lines(node: yaml.Node, at: str, file: Path, lines: dict[str, int], faults: list[Fault]) -> None:
    if isinstance(node, yaml.SequenceNode):
        children = [(str(index), item, item) for index, item in enumerate(node.value)]
    elif isinstance(node, yaml.MappingNode):
        children = [(str(key.value), key, value) for key, value in node.value]
    else:
        return
    seen: dict[str, int] = {}
    for name, key, value in children:
        line = key.start_mark.line + 1
        path = f"{at}.{name}" if at else name
        # `<<` (a merge) may stand several times; everything else must not.
        if name in seen and key.tag != "tag:yaml.org,2002:merge":
            faults.append(
                Fault(f"{file}:{line} ({path})", f"the key stands twice; first in line {seen[name]}", hint="keep one")
            )
        seen[name] = line
        lines[path] = line
        _note_lines(value, path, file, lines, faults)


def _syntax_fault(path: Path, error: yaml.YAMLError) -> Fault:
    mark = getattr(error, "problem_mark", None)
    where = f"{path}:{mark.line + 1}" if mark else str(path)
    return Fault(where, f"is not YAML: {getattr(error, 'problem', None) or error}")
