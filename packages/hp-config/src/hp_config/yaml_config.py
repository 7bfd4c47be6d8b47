"""Configs as YAML, strict both ways: what is written reads back equal, and nothing unknown or mistyped passes.

In: a trainer config, or a YAML document whose first key is `hp_config`. Out: YAML text, or a `TreeReading`.
A document holds a whole tree (with `_type` at its root, as `dump_yaml` writes it), or only changes to a recipe.
"""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

import yaml

from hp_config._legacy.sections import HyperTrainerConfig
from hp_config.annotations import union_members
from hp_config.availability import TORCHTITAN_ONLY
from hp_config.coerce import coerce
from hp_config.document import FORMAT_KEY, Document
from hp_config.fields import fields_of, is_node
from hp_config.recipes import Recipe, find_recipe
from hp_config.tree import join_path
from hp_protocols.configurable import Configurable
from hp_protocols.errors import ConfigError, Fault, nearest
from hp_protocols.references import UnknownNameError, resolve_name
from hp_protocols.serialisation import TYPE_KEY, from_plain, to_plain

__all__ = ["FORMAT_KEY", "TreeReading", "dump_yaml", "read_trainer"]

FORMAT = 1
KNOWN_KEYS = (FORMAT_KEY, "module", "config", "trainer")


def dump_yaml(config: Any, *, module: str | None = None, recipe: str | None = None) -> str:
    """The whole config as YAML that `ConfigManager` and `load_yaml` read back equal.

    Args:
        config: a trainer config; that of the older trainer is written as its own kind of file.
        module, recipe: the recipe it came from; by default what its own field `recipe` (`<module>.<name>`) says.

    Raises:
        TypeError: the config holds a value that cannot be written (a lambda, a tensor), with its place.
    """
    if isinstance(config, HyperTrainerConfig):
        # The older trainer's file has no head; tuples are lists there.
        return yaml.safe_dump(json.loads(json.dumps(dataclasses.asdict(config))), sort_keys=False, allow_unicode=True)
    own_module, _, own_recipe = str(getattr(config, "recipe", "")).partition(".")
    head = {FORMAT_KEY: FORMAT, "module": module or own_module or None, "config": recipe or own_recipe or None}
    document = {key: value for key, value in head.items() if value is not None} | {"trainer": _sections_first(config)}
    return yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=110)


def _sections_first(config: Any) -> dict[str, Any]:
    """The plain tree with the model last: it is long, and the sections are what a reader came for."""
    tree, infos = to_plain(config), fields_of(type(config))
    late = [name for name, info in infos.items() if not info.on_command_line and is_node(getattr(config, name))]
    return {key: value for key, value in tree.items() if key not in late} | {
        key: value for key, value in tree.items() if key in late
    }


@dataclass(slots=True)
class TreeReading:
    """What a document came to.

    Attributes:
        config: the trainer config; None where the faults leave nothing to build.
        module, recipe: what the document says about its origin.
        faults: everything wrong, with dotted paths as places.
        unsure: paths whose value was mistyped; they hold a default now.
    """

    config: Any = None
    module: str | None = None
    recipe: str | None = None
    faults: list[Fault] = field(default_factory=list)
    unsure: set[str] = field(default_factory=set)


def read_trainer(document: Document) -> TreeReading:
    """Read the config of a document whose first key is `hp_config`.

    Raises:
        ConfigError: the document is something else, or names an unknown recipe that its changes apply to.
    """
    data = document.data
    _check_head(document)
    reading = TreeReading(module=data.get("module"), recipe=data.get("config"))
    tree = data.get("trainer")
    if tree is None:
        tree = {}
    if not isinstance(tree, Mapping):
        reading.faults.append(Fault("trainer", f"expected a mapping of sections, got {tree!r}"))
        return reading
    if TYPE_KEY not in tree:
        tree = _laid_over(to_plain(_recipe_of(document).load()), tree)
    checked = _Checker(reading).node(tree, "", Configurable.Config)
    try:
        reading.config = from_plain(checked, Configurable.Config)
    except ConfigError as error:
        # What was taken out for a fault of its own is now missing; that is not a second fault.
        reading.faults += [fault for fault in error.faults if fault.where not in reading.unsure]
    return reading


def _check_head(document: Document) -> None:
    """What precedes the tree: the format and the origin."""
    data, faults = document.data, []
    if data[FORMAT_KEY] != FORMAT:
        faults.append(
            Fault(
                document.place(FORMAT_KEY),
                f"format {data[FORMAT_KEY]!r} is not known to this version of hp-config",
                allowed=str(FORMAT),
                hint="pip install --upgrade hp-config",
            )
        )
    for key, value in data.items():
        if key not in KNOWN_KEYS:
            guess = nearest(str(key), KNOWN_KEYS)
            hint = f"did you mean {guess}?" if guess else "sections of the trainer belong below trainer:"
            faults.append(Fault(f"{document.place(str(key))} ({key})", "no such key", ", ".join(KNOWN_KEYS), hint))
        elif key in ("module", "config") and not isinstance(value, str):
            faults.append(Fault(f"{document.place(key)} ({key})", f"expected a name, got {value!r}"))
    if faults:
        raise ConfigError(faults)


def _recipe_of(document: Document) -> Recipe:
    """The recipe that a document of changes names."""
    try:
        return find_recipe(document.data.get("module"), document.data.get("config"))
    except ConfigError as error:
        keys = [(fault, fault.where.removeprefix("--")) for fault in error.faults]
        raise ConfigError(
            replace(fault, where=f"{document.place(key)} ({key})", hint=(fault.hint or "").replace("--", "") or None)
            for fault, key in keys
        ) from None


def _laid_over(base: Any, changes: Any) -> Any:
    """`changes` laid over the plain tree `base`; a node that names its own class replaces the one below."""
    if not (
        isinstance(base, Mapping) and TYPE_KEY in base and isinstance(changes, Mapping) and TYPE_KEY not in changes
    ):
        return changes
    return {**base, **{key: _laid_over(base.get(key), value) for key, value in changes.items()}}


class _Checker:
    """Walks a plain tree along the declared types: leaves are coerced, wrong ones and unknown keys taken out."""

    def __init__(self, reading: TreeReading) -> None:
        self.reading = reading

    def node(self, data: Mapping[str, Any], path: str, declared: type | None) -> dict[str, Any]:
        cls = self._class_of(data, declared)
        if cls is None:
            # An unknown class is reported by from_plain, with the nearest one.
            return dict(data)
        infos = fields_of(cls)
        checked: dict[str, Any] = {}
        for key, raw in data.items():
            full = join_path(path, key)
            if key in infos:
                if infos[key].readable and not _is_tagged(raw):
                    self._leaf(checked, key, infos[key].annotation, raw, full)
                else:
                    checked[key] = self._inside(raw, infos[key].annotation, full)
            elif key == TYPE_KEY or hasattr(cls, "from_plain_fields"):
                checked[key] = raw
            else:
                self._refuse_key(cls, str(key), list(infos), full)
        return checked

    def _leaf(self, checked: dict[str, Any], key: str, annotation: Any, raw: Any, full: str) -> None:
        try:
            checked[key] = _plain(coerce(annotation, raw, full))
        except ConfigError as error:
            self.reading.faults += error.faults
            self.reading.unsure.add(full)

    def _inside(self, raw: Any, annotation: Any, path: str) -> Any:
        """Nodes in a field, or in the lists and mappings of a field."""
        declared = [member for member in union_members(annotation) if isinstance(member, type)]
        if isinstance(raw, Mapping) and (TYPE_KEY in raw or any(hasattr(c, "__dataclass_fields__") for c in declared)):
            nodes = [member for member in declared if hasattr(member, "__dataclass_fields__")]
            return self.node(raw, path, nodes[0] if len(nodes) == 1 else None)
        if isinstance(raw, Mapping):
            return {key: self._inside(item, Any, join_path(path, key)) for key, item in raw.items()}
        if isinstance(raw, list):
            items = [get_args(member)[0] for member in union_members(annotation) if get_args(member)]
            item_type = items[0] if len(items) == 1 else Any
            return [self._inside(item, item_type, join_path(path, i)) for i, item in enumerate(raw)]
        return raw

    def _class_of(self, data: Mapping[str, Any], declared: type | None) -> type | None:
        if TYPE_KEY not in data:
            return declared
        try:
            cls = resolve_name(data[TYPE_KEY])
        except (UnknownNameError, AttributeError):
            return None
        return cls if isinstance(cls, type) and hasattr(cls, "__dataclass_fields__") else None

    def _refuse_key(self, cls: type, key: str, known: list[str], full: str) -> None:
        if reason := TORCHTITAN_ONLY.get(cls.__name__, {}).get(key):
            self.reading.faults.append(Fault(full, f"a key of torchtitan: {reason}"))
            return
        guess = nearest(key, known)
        if guess:
            self.reading.unsure.add(full.removesuffix(key) + guess)
        hint = f"did you mean {guess}?" if guess else None
        self.reading.faults.append(Fault(full, "no such key", allowed=", ".join(known) or "none", hint=hint))


def _is_tagged(raw: Any) -> bool:
    """Whether a value carries its own class or kind, somewhere; then its annotation does not decide."""
    if isinstance(raw, Mapping):
        return TYPE_KEY in raw or "_kind" in raw or any(map(_is_tagged, raw.values()))
    return isinstance(raw, list) and any(map(_is_tagged, raw))


def _plain(value: Any) -> Any:
    """A coerced value as plain data again, for `from_plain`."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    return value
