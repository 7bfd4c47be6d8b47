"""The command line as tyro shows and parses it: options grouped by section, with the recipe's values as defaults.

In: a config and the option values that `flags` has read. Out: a changed copy, or the text of `--help`.
tyro is an extra (`hp-config[cli]`) and is imported when it is needed. It sees a mirror of the config, in which every
leaf is read by `coerce`: tyro, YAML and the pre-pass cannot disagree about a value.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal, get_args, get_origin

import yaml

from hp_config.annotations import describe, strip_annotated
from hp_config.availability import NOT_YET
from hp_config.coerce import coerce
from hp_config.fields import field_docs, fields_of, is_node
from hp_config.model_text import describe_hidden
from hp_config.tree import Option, find_options, join_path, replace_at
from hp_protocols import errors

__all__ = ["MissingExtraError", "apply_options", "load_tyro", "print_help", "to_text"]


class MissingExtraError(errors.MissingExtraError):
    """tyro is not installed; the message says how to get it."""


def load_tyro() -> ModuleType:
    """tyro.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        import tyro
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            'command-line options for a recipe need tyro: pip install "hp-config[cli]" '
            "(a run's resolved.yaml can be used without it)"
        ) from error
    return tyro


def apply_options(config: Any, values: Mapping[str, Any]) -> Any:
    """A copy of `config` with `values` (by dotted path) set, through tyro with `config` as the defaults.

    Raises:
        ConfigError: a config's own `__post_init__` refuses the values.
        MissingExtraError: tyro is not installed.
    """
    words = [f"--{path}={to_text(value)}" for path, value in values.items()]
    parsed = load_tyro().cli(_mirror(config, ""), args=words, use_underscores=True)
    return replace_at(config, {path: _value_at(parsed, path) for path in values})


def print_help(config: Any, prog: str, description: str) -> None:
    """Print every option by section with its default and its docstring, then what recipes alone can set.

    Raises:
        MissingExtraError: tyro is not installed.
    """
    try:
        load_tyro().cli(_mirror(config, ""), args=["--help"], prog=prog, description=description, use_underscores=True)
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
    print(describe_hidden(config), end="")


def to_text(value: Any) -> str:
    """A value as one word of a command line; `coerce(annotation, to_text(value), …, text=True)` gives it back."""
    if isinstance(value, enum.Enum):
        return str(value.value)
    if isinstance(value, str | Path):
        return str(value)
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    plain = list(value) if isinstance(value, tuple | set | frozenset) else value
    return yaml.safe_dump(plain, default_flow_style=True, width=10**9, allow_unicode=True).strip()


def _mirror(node: Any, path: str) -> type:
    """A dataclass with the options of `node` and nothing else, typed so that tyro leaves the reading to `coerce`."""
    options = find_options(node)
    docs = field_docs(type(node))
    mirrored: list[tuple[str, Any, Any]] = []
    for info in fields_of(type(node)).values():
        value, full = getattr(node, info.name), join_path(path, info.name)
        if info.on_command_line and is_node(value):
            if find_options(value):
                section = _mirror(value, full)
                titled = Annotated[section, load_tyro().conf.arg(help=_first_paragraph(type(value)))]  # type: ignore[valid-type]
                mirrored.append((info.name, titled, dataclasses.field(default_factory=section)))
        elif info.name in options:
            option = dataclasses.replace(options[info.name], path=full)
            sentence = docs.get(info.name) or describe(option.annotation)
            if info.name in NOT_YET.get(type(node).__name__, {}):
                sentence += " Not available yet."
            leaf = _leaf(option, sentence)
            mirrored.append((info.name, leaf, dataclasses.field(default_factory=functools.partial(copy.copy, value))))
    mirror = dataclasses.make_dataclass(type(node).__name__, mirrored, kw_only=True)
    # Without one, tyro would print the signature that dataclasses make up.
    mirror.__doc__ = ""
    return mirror


def _leaf(option: Option, sentence: str) -> Any:
    tyro = load_tyro()
    spec = tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar=_metavar(option.annotation),
        instance_from_str=lambda words: coerce(option.annotation, words[0], option.flag, text=True),
        is_instance=lambda value: True,
        str_from_instance=lambda value: [to_text(value)],
    )
    return Annotated[Any, spec, tyro.conf.arg(help=sentence)]


def _metavar(annotation: Any) -> str:
    annotation = strip_annotated(annotation)
    members = [annotation] if get_origin(annotation) is Literal else get_args(annotation)
    if get_origin(annotation) is Literal:
        return "{" + ",".join(map(str, get_args(annotation))) + "}"
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return "{" + ",".join(str(member.value) for member in annotation) + "}"
    words = {bool: "BOOL", int: "INT", float: "FLOAT", str: "TEXT", type(None): "none", Path: "PATH", Any: "VALUE"}
    if annotation in words:
        return words[annotation]
    origin = get_origin(annotation) or annotation
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return "KEY=VALUE,…"
    if isinstance(origin, type) and issubclass(origin, list | tuple | set | frozenset):
        items = [_metavar(member) for member in members if member is not Ellipsis] or ["VALUE"]
        fixed = origin is tuple and members and members[-1] is not Ellipsis
        return ",".join(items) if fixed else f"{items[0]},…"
    return "|".join(dict.fromkeys(_metavar(member) for member in members)) or "VALUE"


def _first_paragraph(cls: type) -> str:
    """The first paragraph of a section's docstring; the owner's where a nested Config has none of its own."""
    for source in (cls, getattr(cls, "_owner", None)):
        text = (getattr(source, "__doc__", None) or "").strip()
        # A dataclass without a docstring gets its signature for one.
        if text and not text.startswith(f"{cls.__name__}("):
            return " ".join(text.split("\n\n")[0].split())
    return ""


def _value_at(node: Any, path: str) -> Any:
    for name in path.split("."):
        node = getattr(node, name)
    return node
