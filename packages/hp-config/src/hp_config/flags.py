"""Options as they are typed, read against the config they change; every mistake is found in one pass.

In: the words of a command line and the config whose fields they name. Out: typed values by dotted path.
This runs before tyro, which knows fewer forms (`--x=true`), stops at the first mistake and does not check defaults.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hp_config.annotations import container_kind, describe, union_members
from hp_config.availability import TORCHTITAN_ONLY
from hp_config.coerce import coerce
from hp_config.notices import warn_once
from hp_config.tree import Option, find_nodes, find_options, find_refused
from hp_protocols.errors import ConfigError, Fault, nearest

__all__ = ["FlagReading", "Words", "read_flags", "split_words"]

HELP_WORDS = ("-h", "--help")


@dataclass(frozen=True, slots=True)
class Words:
    """A command line taken apart: what chooses the config, and what changes it.

    Attributes:
        module, recipe: the values of `--module` and `--config`.
        file: a leading argument that is no option: a YAML file or a run's folder.
        wants_help: `-h` or `--help` was among the words.
        options: the remaining words, in order.
    """

    module: str | None
    recipe: str | None
    file: str | None
    wants_help: bool
    options: tuple[str, ...]


@dataclass(slots=True)
class FlagReading:
    """What the words came to: values by path, all faults, and the paths about which nothing is known for sure."""

    values: dict[str, Any] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    unsure: set[str] = field(default_factory=set)


def split_words(argv: Sequence[str]) -> Words:
    """Take `--module`, `--config`, the file and `--help` out of a command line.

    Raises:
        ConfigError: `--module` or `--config` without a value, or twice with different values.
    """
    chosen: dict[str, str] = {}
    faults: list[Fault] = []
    options: list[str] = []
    words = list(argv)
    file = words.pop(0) if words and not words[0].startswith("-") else None
    wants_help = False
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        if word in HELP_WORDS:
            wants_help = True
        elif name in ("--module", "--config"):
            if not equals and words and not words[0].startswith("-"):
                value = words.pop(0)
            if not value:
                faults.append(Fault(name, "a value is missing", hint=f"{name} NAME; `hp list` shows the names"))
            elif chosen.setdefault(name, value) != value:
                faults.append(Fault(name, f"given twice: {chosen[name]}, then {value}"))
        else:
            options.append(word)
    if faults:
        raise ConfigError(faults)
    if file and chosen and not Path(file).exists():
        # Next to --module no file belongs; this is a misplaced word, such as an option without its dashes.
        options.insert(0, file)
        file = None
    return Words(chosen.get("--module"), chosen.get("--config"), file, wants_help, tuple(options))


def read_flags(words: Sequence[str], config: Any) -> FlagReading:
    """Read options against `config`; never raises, all mistakes are in the result's `faults`."""
    options, refused = find_options(config), find_refused(config)
    reading = FlagReading()
    left = list(words)
    while left:
        word = left.pop(0)
        if not word.startswith("--") or word == "--":
            reading.faults.append(_stray(word, options))
            continue
        name, equals, given = word[2:].partition("=")
        path = name.replace("-", "_")
        option, negated = _look_up(path, options)
        if option is None:
            _refuse_unknown(name, path, options, refused, config, reading)
            if not equals and left and not _is_flag(left[0]):
                left.pop(0)
            continue
        values = [given] if equals else _take_values(option, left)
        _read_one(option, negated, values, reading, word)
    return reading


def _look_up(path: str, options: Mapping[str, Option]) -> tuple[Option | None, bool]:
    """The option of a path, and whether it was named in a negative: `a.no_x` or `no_a.x` for a boolean `a.x`."""
    if path in options:
        return options[path], False
    section, _, name = path.rpartition(".")
    candidates = []
    if name.startswith("no_"):
        candidates.append(f"{section}.{name[3:]}" if section else name[3:])
    if path.startswith("no_"):
        candidates.append(path[3:])
    for candidate in candidates:
        if candidate in options and _is_boolean(options[candidate]):
            return options[candidate], True
    return None, False


def _take_values(option: Option, left: list[str]) -> list[str]:
    """Take the words that are the value of an option written without `=`; a word never stands on its own."""
    values: list[str] = []
    while left and not _is_flag(left[0]):
        values.append(left.pop(0))
        if container_kind(option.annotation) is None:
            break
    return values


def _read_one(option: Option, negated: bool, values: list[str], reading: FlagReading, word: str) -> None:
    flag = option.flag
    try:
        if negated and values:
            raise ConfigError(Fault(f"--{word[2:]}", "takes no value", hint=f"{flag}=true or {flag}=false"))
        if _is_boolean(option) and not values:
            value: Any = not negated
        elif not values:
            raise ConfigError(Fault(flag, "a value is missing", allowed=describe(option.annotation)))
        else:
            # Several words are the items of a container; one word may be the whole of it.
            text: Any = values[0] if len(values) == 1 else _join(option, values)
            value = coerce(option.annotation, text, flag, text=True)
    except ConfigError as error:
        reading.faults.extend(error.faults)
        reading.unsure.add(option.path)
        return
    if option.path in reading.values and reading.values[option.path] != value:
        before = reading.values[option.path]
        warn_once("%s is given twice: %r, then %r; the last one counts", flag, before, value)
    reading.values[option.path] = value


def _join(option: Option, values: list[str]) -> Any:
    pairs = [value.partition("=") for value in values]
    if container_kind(option.annotation) is dict and all(equals for _, equals, _ in pairs):
        return {key: value for key, _, value in pairs}
    return values


def _refuse_unknown(
    name: str,
    path: str,
    options: Mapping[str, Option],
    refused: Mapping[str, str],
    config: Any,
    reading: FlagReading,
) -> None:
    flag = f"--{name}"
    sections = dict(find_nodes(config, command_line_only=True))
    if path in refused:
        hint = None
        inside = [option.path for option in options.values() if option.path.startswith(f"{path}.")]
        if inside:
            hint = f"its options begin with --{path}., such as --{inside[0]}"
        reading.faults.append(Fault(flag, refused[path], hint=hint))
        return
    # An option below something that is no section: a model's dimension, say.
    closed = next((above for above in refused if path.startswith(f"{above}.") and above not in sections), None)
    if closed is not None:
        reading.faults.append(Fault(flag, f"{closed} {refused[closed]}"))
        return
    section, _, last = path.rpartition(".")
    owner = type(sections[section]).__name__ if section in sections else ""
    if last in TORCHTITAN_ONLY.get(owner, {}):
        reading.faults.append(Fault(flag, f"an option of torchtitan: {TORCHTITAN_ONLY[owner][last]}"))
        return
    guess = guess_option(path, options)
    if guess is not None:
        reading.unsure.add(guess)
    hint = f"did you mean --{guess}?" if guess else "--help lists the options"
    reading.faults.append(Fault(flag, "no such option", hint=hint))


def guess_option(path: str, known: Mapping[str, Any]) -> str | None:
    """The known path that was probably meant: the same last name, else the nearest path, else the nearest name."""
    last = path.rpartition(".")[2]
    same_name = [other for other in known if other.rpartition(".")[2] == last]
    if len(same_name) == 1:
        return same_name[0]
    guess = nearest(path, same_name or known)
    if guess is not None or same_name:
        return guess or same_name[0]
    # Names are short; what is only half alike is another word.
    names = {other.rpartition(".")[2]: other for other in known}
    close = difflib.get_close_matches(last, names, n=1, cutoff=0.75)
    return names[close[0]] if close else None


def _stray(word: str, options: Mapping[str, Option]) -> Fault:
    name, equals, _ = word.lstrip("-").partition("=")
    if equals and name.replace("-", "_") in options:
        return Fault(word, "an option begins with two dashes", hint=f"--{word.lstrip('-')}")
    return Fault(word, "no option comes before this word", hint="options are written --section.name VALUE")


def _is_flag(word: str) -> bool:
    """Whether a word opens an option; `-1` and `-abc` are values."""
    return word.startswith("--") or word in HELP_WORDS


def _is_boolean(option: Option) -> bool:
    return set(union_members(option.annotation)) - {type(None)} == {bool}
