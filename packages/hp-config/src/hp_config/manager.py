"""From a command line or a YAML file to one checked trainer config.

In: `--module M --config C` or a YAML file, then options. Out: the config, or one `ConfigError` with every fault, each
with its place: the flag that was typed, or file and line.
"""

from __future__ import annotations

import dataclasses
import math
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hp_config._legacy.reader import is_legacy, read_legacy
from hp_config._legacy.sections import HyperTrainerConfig
from hp_config.command_line import apply_options, load_tyro, print_help
from hp_config.document import Document, read_document
from hp_config.flags import Words, read_flags, split_words
from hp_config.notices import warn_once
from hp_config.recipes import find_recipe
from hp_config.tree import replace_at
from hp_config.validation import find_faults
from hp_config.yaml_config import FORMAT_KEY, TreeReading, read_trainer
from hp_protocols.errors import ConfigError, Fault

__all__ = ["ConfigManager", "load_yaml"]


class ConfigManager:
    """Reads one command line. After `parse_args` it knows where the config came from.

    Attributes:
        config: the config that `parse_args` returned.
        module, recipe: the names of the recipe; None where a YAML does not say.
        file: the YAML file, or None.
    """

    def __init__(self) -> None:
        self.config: Any = None
        self.module: str | None = None
        self.recipe: str | None = None
        self.file: Path | None = None

    def parse_args(self, argv: Sequence[str] | None = None, *, world_size: int | None = None) -> Any:
        """The trainer config of a command line.

        `--module M --config C` starts from a recipe; a leading path starts from a YAML whose first key is
        `hp_config`, or from a run's folder, which holds one. Options `--section.field value` then change it.
        A YAML of the older trainer (sections model, data, train) gives a `HyperTrainerConfig`, for `LLMTrainer`.

        Args:
            argv: the words after the command's name; by default the process's own.
            world_size: the number of processes, if it is known: the degrees are then checked against it.

        Raises:
            ConfigError: with every fault of the command line, the file and the values together.
            MissingExtraError: a recipe was asked for and tyro is missing (`pip install "hp-config[cli]"`);
                it is an ImportError.
            SystemExit: `--help` was given; the help is printed and the code is 0.
        """
        words = split_words(sys.argv[1:] if argv is None else argv)
        if (legacy := _legacy_document(words)) is not None:
            return self._parse_legacy(legacy, words, world_size)
        origin = _from_file(words) if words.file is not None else _from_recipe(words)
        if words.wants_help:
            _show_help(origin)
        self.config = _finish(origin, words.options, world_size)
        self.module, self.recipe = origin.module, origin.recipe
        self.file = origin.document.path if origin.document else None
        return self.config

    def _parse_legacy(self, document: Document, words: Words, world_size: int | None) -> HyperTrainerConfig:
        if words.wants_help:
            _print_help(HyperTrainerConfig(), str(document.path))
        self.config, self.file = read_legacy(document, words.options, world_size=world_size), document.path
        self.module = self.recipe = None
        return self.config


def load_yaml(path: str | Path, *, world_size: int | None = None) -> Any:
    """The checked config of a YAML file that `dump_yaml` wrote, or of a run's folder.

    Raises:
        ConfigError: with every fault, each with file and line.
    """
    return ConfigManager().parse_args([str(path)], world_size=world_size)


@dataclass(frozen=True, slots=True)
class _Origin:
    """The config before options, and everything that is already known to be wrong with it."""

    config: Any
    module: str | None
    recipe: str | None
    document: Document | None = None
    faults: tuple[Fault, ...] = ()
    unsure: frozenset[str] = frozenset()


def _from_recipe(words: Words) -> _Origin:
    load_tyro()
    recipe = find_recipe(words.module, words.recipe)
    config = recipe.load()
    if _has_field(config, "recipe"):
        config = dataclasses.replace(config, recipe=f"{recipe.module}.{recipe.name}")
    return _Origin(config, recipe.module, recipe.name)


def _from_file(words: Words) -> _Origin:
    if words.module or words.recipe:
        flag = "--module" if words.module else "--config"
        raise ConfigError(Fault(flag, f"cannot be combined with the file {words.file}, which names its own recipe"))
    document = read_document(Path(words.file or ""))
    data = document.data
    if not isinstance(data, Mapping) or FORMAT_KEY not in data:
        raise ConfigError(_foreign_file(document))
    if next(iter(data)) != FORMAT_KEY:
        raise ConfigError(Fault(document.place(FORMAT_KEY), f"{FORMAT_KEY} must be the first key of the file"))
    reading: TreeReading = read_trainer(document)
    faults = tuple(_relocate(reading.faults, {}, document))
    if reading.config is None:
        raise ConfigError(_in_order(faults, document))
    return _Origin(reading.config, reading.module, reading.recipe, document, faults, frozenset(reading.unsure))


def _foreign_file(document: Document) -> Fault:
    allowed = f"a file that begins with `{FORMAT_KEY}: 1`, such as a run's resolved.yaml; or one of the older trainer"
    return Fault(str(document.path), "is no configuration", f"{allowed}, with sections model, data and train")


def _legacy_document(words: Words) -> Document | None:
    """The file of the command line, if it is one of the older trainer."""
    if words.file is None or words.module or words.recipe:
        return None
    document = read_document(Path(words.file))
    mapping = isinstance(document.data, Mapping) and FORMAT_KEY not in document.data
    return document if mapping and is_legacy(document.data) else None


def _finish(origin: _Origin, options: Sequence[str], world_size: int | None) -> Any:
    """Apply the options and check everything; raises with all faults at once."""
    flags = read_flags(options, origin.config)
    faults, values, unsure = [*origin.faults, *flags.faults], dict(flags.values), origin.unsure | flags.unsure
    try:
        config = _apply(origin, values)
    except ConfigError as error:
        # A section refuses its values as a whole. It is left as it was, and the others are still checked.
        faults += _relocate(error.faults, values, origin.document)
        refused = {path for fault in error.faults for path in fault.where.split(", ")}
        unsure |= refused
        config = replace_at(origin.config, {path: value for path, value in values.items() if path not in refused})
    faults += _relocate(find_faults(config, world_size, unsure), values, origin.document)
    if faults:
        raise ConfigError(_in_order(faults, origin.document))
    return _clamp_warmup(config)


def _apply(origin: _Origin, values: Mapping[str, Any]) -> Any:
    if not values:
        return origin.config
    if origin.document is not None:
        # A file works without tyro; the values are the same, since both ways read them by `coerce`.
        return replace_at(origin.config, values)
    return apply_options(origin.config, values)


def _relocate(faults: Sequence[Fault], typed: Collection[str], document: Document | None) -> list[Fault]:
    """Faults with the places the user knows; a fault of several fields has their paths joined by a comma."""
    return [
        replace(fault, where=", ".join(_place(path, typed, document) for path in fault.where.split(", ")))
        for fault in faults
    ]


def _place(path: str, typed: Collection[str], document: Document | None) -> str:
    """The flag if it was typed, else file and line, else the path as it is (the recipe's own value)."""
    if any(path == flag or path.startswith((f"{flag}[", f"{flag}.")) for flag in typed):
        return f"--{path}"
    return f"{document.place(f'trainer.{path}')} ({path})" if document else path


def _in_order(faults: Sequence[Fault], document: Document | None) -> list[Fault]:
    """The faults of a file by line, then those of the command line as they were found."""
    if document is None:
        return list(faults)
    start = re.compile(re.escape(f"{document.path}:") + r"(\d+)")

    def line(fault: Fault) -> float:
        found = start.match(fault.where)
        return int(found[1]) if found else math.inf

    return sorted(faults, key=line)


def _clamp_warmup(config: Any) -> Any:
    """A copy whose warm-up is no longer than its schedule, with a log line if that changed it; else `config`."""
    scheduler = getattr(config, "lr_scheduler", None)
    warmup = getattr(scheduler, "warmup_steps", None)
    total = getattr(scheduler, "total_steps", None) or getattr(getattr(config, "training", None), "steps", None)
    if not isinstance(total, int) or not isinstance(warmup, int) or warmup <= total:
        return config
    warn_once("lr_scheduler.warmup_steps %d is longer than the run; set to its %d steps", warmup, total)
    return replace_at(config, {"lr_scheduler.warmup_steps": total})


def _show_help(origin: _Origin) -> None:
    chosen = str(origin.document.path) if origin.document else f"--module {origin.module} --config {origin.recipe}"
    _print_help(origin.config, chosen)


def _print_help(config: Any, chosen: str) -> None:
    print_help(
        config,
        prog=f"hp train {chosen}",
        description="Options of this configuration, with its values as defaults. "
        "Written --section.field VALUE or --section.field=VALUE; booleans also as --section.field and "
        "--section.no-field; underscores and dashes are the same.",
    )
    raise SystemExit(0)


def _has_field(config: Any, name: str) -> bool:
    return any(field.name == name for field in dataclasses.fields(config))
