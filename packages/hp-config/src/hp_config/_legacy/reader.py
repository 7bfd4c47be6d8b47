"""Reads the older trainer's YAML and overrides, strictly: every fault at once, each with file and line or flag.

In: a YAML path and `--dot.path=value` words. Out: a `HyperTrainerConfig`.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

from hp_config._legacy.sections import HyperTrainerConfig
from hp_config._legacy.words import BOOLEANS, as_number, older_words, set_items, split_items
from hp_config.coerce import coerce
from hp_config.document import FORMAT_KEY, Document, read_document
from hp_config.fields import FieldInfo, fields_of, is_node
from hp_config.flags import read_flags
from hp_config.tree import find_options, join_path, replace_at
from hp_config.validation import find_faults
from hp_protocols.errors import ConfigError, Fault, nearest

__all__ = ["is_legacy", "parse_args", "read_legacy"]

T = TypeVar("T")

# Sections that other tools, and the oldest files, have at the top → where their keys belong.
MOVED = {
    "parallel": "train.accelerator",
    "parallelism": "train.accelerator",
    "accelerator": "train.accelerator",
    "optim": "train.optimizer",
    "optimizer": "train.optimizer",
    "memory": "train.gradient_checkpointing",
    "gradient_checkpointing": "train.gradient_checkpointing",
    "profiler": "train.profile",
    "runtime": "train",
    "checkpoint": "train.checkpoint",
    "logging": "train.logging",
    "mixed_precision": "train.mixed_precision",
}


def is_legacy(data: Mapping[Any, Any]) -> bool:
    """Whether a mapping has a section of the older trainer's YAML, of now or before."""
    return not {*fields_of(HyperTrainerConfig), *MOVED}.isdisjoint(data)


def parse_args(cls: type[T] = HyperTrainerConfig, argv: Sequence[str] | None = None) -> T:  # type: ignore[assignment]
    """The configuration of `script.py FILE.yaml --train.max_steps=20`.

    Args:
        cls: `HyperTrainerConfig`, or a dataclass of the same three sections (its fields may be subclasses).
        argv: the words after the script's name; by default the process's own.

    Raises:
        ConfigError: (a ValueError) with every fault of the file and the words.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0].startswith("-"):
        raise ConfigError(
            Fault("the command", "the YAML file is missing", hint="script.py FILE.yaml --train.max_steps=20")
        )
    return read_legacy(read_document(Path(words[0])), words[1:], cls)


def read_legacy(
    document: Document,
    options: Sequence[str] = (),
    cls: type[T] = HyperTrainerConfig,  # type: ignore[assignment]
    *,
    world_size: int | None = None,
) -> T:
    """The configuration of a document of the three sections, with options on top.

    Args:
        world_size: the number of processes, if it is known: the degrees are then checked against it.

    Raises:
        ConfigError: with every fault, each with file and line, or the flag.
    """
    reading = _Reading(document)
    config = reading.read(cls)
    words, items = split_items(older_words(options, config))
    flags = read_flags(words, config)
    config = set_items(replace_at(config, flags.values), items, flags)
    faults = [*reading.faults, *flags.faults]
    unsure = reading.unsure | flags.unsure
    found = find_faults(config, None if faults else world_size, unsure=unsure)
    for fault in found:
        typed = any(fault.where == path or fault.where.startswith(f"{path}[") for path in flags.values)
        faults.append(dataclasses.replace(fault, where=f"--{fault.where}" if typed else reading.place(fault.where)))
    if faults:
        raise ConfigError(faults)
    return config


class _Reading:
    """One walk over a document; gathers faults and the paths whose value is a default instead of what was meant."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.faults: list[Fault] = []
        self.unsure: set[str] = set()

    def place(self, path: str) -> str:
        """File, line and path; the path alone where the file does not mention it."""
        return f"{self.document.place(path)} ({path})"

    def read(self, cls: type[T]) -> T:
        data = self.document.data
        if not isinstance(data, Mapping):
            raise ConfigError(Fault(str(self.document.path), "is no configuration", "sections model, data and train"))
        if FORMAT_KEY in data:
            problem = f"is a file of the newer trainer ({FORMAT_KEY}: {data[FORMAT_KEY]})"
            hint = f"hp train {self.document.path} takes it as it is"
            raise ConfigError(Fault(self.place(FORMAT_KEY), problem, "sections model, data and train", hint))
        self._refuse_other_sections(data, cls)
        known = {key: value for key, value in data.items() if key in fields_of(cls)}
        return self._node(cls(), known, "")

    def _refuse_other_sections(self, data: Mapping[Any, Any], cls: type) -> None:
        for key in data:
            if key in fields_of(cls):
                continue
            hint = f"its keys belong below {MOVED[key]}" if key in MOVED else None
            if hint is None and (near := nearest(str(key), fields_of(cls))):
                hint = f"did you mean {near}?"
            problem = "is no section of this file"
            self.faults.append(Fault(self.place(str(key)), problem, ", ".join(fields_of(cls)), hint))

    def _node(self, default: Any, data: Any, path: str) -> Any:
        """`default` with the values of a mapping; an empty section leaves it as it is."""
        if data is None:
            return default
        if not isinstance(data, Mapping):
            self.faults.append(Fault(self.place(path), f"expected a mapping of keys, got {data!r}"))
            return default
        infos = fields_of(type(default))
        changes = {}
        for key, raw in data.items():
            full = join_path(path, str(key))
            if key not in infos:
                self._unknown(full, str(key), infos)
            elif is_node(getattr(default, key)):
                changes[key] = self._node(getattr(default, key), raw, full)
            else:
                try:
                    changes[key] = coerce(infos[key].annotation, _older_word(raw, infos[key]), self.place(full))
                except ConfigError as error:
                    self.faults += error.faults
                    self.unsure.add(full)
        return dataclasses.replace(default, **changes)

    def _unknown(self, full: str, key: str, infos: Mapping[str, FieldInfo]) -> None:
        near = nearest(key, infos)
        elsewhere = [path for path in find_options(HyperTrainerConfig()) if path.rpartition(".")[2] == key]
        hint = f"did you mean {near}?" if near else f"it belongs at {elsewhere[0]}" if elsewhere else None
        if near is not None:
            self.unsure.add(f"{full.rpartition('.')[0]}.{near}")
        self.faults.append(Fault(self.place(full), "no such key", hint=hint))


def _older_word(raw: Any, info: FieldInfo) -> Any:
    """A value as the older reader took it: more words for booleans, and `off`, which YAML reads as a boolean."""
    if isinstance(raw, str) and info.annotation is bool:
        return BOOLEANS.get(raw.strip().lower(), raw)
    if raw is False and "off" in get_args(info.annotation):
        return "off"
    if isinstance(raw, Mapping):
        # A mapping of anything, so that nothing else says that 1e-5, text in YAML 1.1, is a number.
        return {key: as_number(value) for key, value in raw.items()}
    return raw
