"""Faults that a user can mend: what was given, where, what is allowed, what to do next.

In: one `Fault` per mistake. Out: one `ConfigError` that carries them all, so that a user sees every
mistake of a command at once. The `hp` command prints it without a traceback and exits with code 2.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["ConfigError", "Fault", "MissingExtraError", "nearest"]


@dataclass(frozen=True, slots=True)
class Fault:
    """One mistake in a configuration, a command or an input file.

    Attributes:
        where: the place as the user knows it: a flag (`--training.steps`), a file and line
            (`data.jsonl:3`), or a dotted path in a config (`training.steps`).
        problem: what is wrong, with the value that was given.
        allowed: what would be right (values, range, type), if that can be said.
        hint: the next step, as a command or an instruction, if there is one.
    """

    where: str
    problem: str
    allowed: str | None = None
    hint: str | None = None

    def __str__(self) -> str:
        text = f"{self.where}: {self.problem}"
        if self.allowed:
            text += f"; allowed: {self.allowed}"
        if self.hint:
            text += f"\n    → {self.hint}"
        return text


class ConfigError(ValueError):
    """All the mistakes found in one go, each a `Fault`.

    Raised before anything has been written. `str()` gives one line per fault, its hint below it.
    """

    def __init__(self, faults: Fault | Iterable[Fault]) -> None:
        self.faults: Sequence[Fault] = (faults,) if isinstance(faults, Fault) else tuple(faults)
        if not self.faults:
            raise ValueError("ConfigError needs at least one Fault")
        super().__init__("\n".join(str(fault) for fault in self.faults))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[Sequence[Fault]]]:
        return type(self), (self.faults,)


class MissingExtraError(ImportError):
    """An optional dependency is not installed; the message says what needs it and how to get it."""


def nearest(given: str, known: Iterable[str]) -> str | None:
    """The known name that is closest to `given`, or None when nothing is close. Upper and lower case are alike."""
    by_lower = {name.lower(): name for name in known}
    matches = difflib.get_close_matches(given.lower(), by_lower, n=1, cutoff=0.6)
    return by_lower[matches[0]] if matches else None
