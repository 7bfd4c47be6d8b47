"""What a config class declares: its fields, their types, their docstrings, and which belong on a command line.

In: a dataclass (a `Config` or a section). Out: one `FieldInfo` per field. Annotations that cannot be resolved
(types imported only for a type checker) leave a field opaque: it is kept, compared and saved, but not read from text.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import sys
import textwrap
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from hp_config.annotations import is_supported, strip_annotated

__all__ = ["OFF_COMMAND_LINE", "FieldInfo", "field_docs", "fields_of", "is_node"]

OFF_COMMAND_LINE = frozenset({"model_spec", "param_init", "sharding_config"})
"""Fields that are set by recipes and models, never by an option, wherever they stand."""


@dataclasses.dataclass(frozen=True, slots=True)
class FieldInfo:
    """One field of a config class.

    Attributes:
        name: the attribute.
        annotation: its type; None where it could not be resolved.
        readable: `coerce` can read it from YAML or text.
        on_command_line: nothing keeps it off (its name, `metadata={"cli": False}`, a leading underscore).
    """

    name: str
    annotation: Any
    readable: bool
    on_command_line: bool


def is_node(value: Any) -> bool:
    """Whether a value is a config node (a dataclass instance) and not a leaf."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def fields_of(cls: type) -> Mapping[str, FieldInfo]:
    """The constructor's fields of a dataclass by name, in declaration order."""
    return _fields_of(cls)


@functools.cache
def _fields_of(cls: Any) -> Mapping[str, FieldInfo]:
    infos = {}
    for field in dataclasses.fields(cls):
        if not field.init:
            continue
        annotation = _resolve(cls, field)
        hidden = field.name.startswith("_") or field.name in OFF_COMMAND_LINE or not field.metadata.get("cli", True)
        infos[field.name] = FieldInfo(
            name=field.name,
            annotation=annotation,
            readable=annotation is not None and is_supported(annotation),
            on_command_line=not hidden,
        )
    return infos


def _resolve(cls: type, field: dataclasses.Field[Any]) -> Any:
    """The field's type as an object; None if its text names something that is not there at run time."""
    if not isinstance(field.type, str):
        return strip_annotated(field.type)
    for owner in cls.__mro__:
        if field.name not in inspect.get_annotations(owner):
            continue
        module = sys.modules.get(owner.__module__)
        scope = {**vars(typing), **(vars(module) if module else {})}
        try:
            # The text is a field's annotation in an imported module, as typing.get_type_hints would evaluate it.
            return strip_annotated(eval(field.type, scope, dict(vars(owner))))
        except (NameError, AttributeError):
            return None
    return None


def field_docs(cls: type) -> Mapping[str, str]:
    """The docstring below each field, its own class first, then what a base class says; empty without source."""
    return _field_docs(cls)


@functools.cache
def _field_docs(cls: Any) -> Mapping[str, str]:
    docs: dict[str, str] = {}
    for owner in reversed(cls.__mro__):
        if dataclasses.is_dataclass(owner):
            docs.update(_docs_in_source(owner))
    return docs


def _docs_in_source(cls: Any) -> Iterator[tuple[str, str]]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError, SyntaxError):
        # No source to read (a class made at run time): its fields go without a sentence in --help.
        return
    body = tree.body[0].body if tree.body and isinstance(tree.body[0], ast.ClassDef) else []
    for statement, following in itertools.pairwise(body):
        match statement, following:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(sentence))):
                yield name, " ".join(sentence.split())
