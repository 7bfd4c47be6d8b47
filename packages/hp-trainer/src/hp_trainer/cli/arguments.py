"""Small command lines: argparse whose mistakes are faults, and whose flags take `_` and `-` alike.

In: a description of positionals and flags. Out: a parser that raises ConfigError instead of ending the process.
"""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from hp_protocols.errors import ConfigError, Fault

__all__ = ["Arguments"]


class Arguments(argparse.ArgumentParser):
    """A parser for one subcommand; `--help` is the subcommand's own text."""

    def __init__(self, command: str) -> None:
        super().__init__(prog=command, add_help=False, allow_abbrev=False)

    def flag(self, name: str, **options: Any) -> None:
        """An option `--name`, also spelled with dashes."""
        self.add_argument(*dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}")), dest=name, **options)

    def error(self, message: str) -> NoReturn:
        where, _, problem = message.removeprefix("argument ").partition(": ")
        if not problem:
            where, problem = self.prog, message
        raise ConfigError(Fault(where.split("/")[0], problem, hint=f"{self.prog} --help"))
