"""Small command lines: argparse whose mistakes are faults, and whose flags take `_` and `-` alike.

In: a description of positionals and flags. Out: a parser that raises ConfigError instead of ending the process.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from hp_protocols.errors import ConfigError, Fault, nearest

__all__ = ["Arguments"]


class Arguments(argparse.ArgumentParser):
    """A parser for one subcommand; `--help` is the subcommand's own text."""

    def __init__(self, command: str) -> None:
        super().__init__(prog=command, add_help=False, allow_abbrev=False)

    def flag(self, name: str, **options: Any) -> None:
        """An option `--name`, also spelled with dashes."""
        self.add_argument(*dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}")), dest=name, **options)

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """The options.

        Raises:
            ConfigError: a value is no such value, or missing; or every word that means nothing here.
        """
        found, strangers = self.parse_known_args(args, namespace)
        if strangers:
            # A value that was meant for a misspelt option is no mistake of its own.
            options = [word for word in strangers if word.startswith("-")]
            raise ConfigError([self._unknown(word.partition("=")[0]) for word in options or strangers])
        return found

    def error(self, message: str) -> NoReturn:
        where, _, problem = message.removeprefix("argument ").partition(": ")
        missing = message.removeprefix("the following arguments are required: ")
        if missing != message:
            where, problem = missing, "is missing"
        elif not problem:
            where, problem = self.prog, message
        raise ConfigError(Fault(where.split("/")[0], problem, hint=f"{self.prog} --help"))

    def _unknown(self, word: str) -> Fault:
        if not word.startswith("-"):
            return Fault(word, "is one word too many", hint=f"{self.prog} --help")
        near = nearest(word, self._option_string_actions)
        return Fault(word, "no such option", hint=f"did you mean {near}?" if near else f"{self.prog} --help")
