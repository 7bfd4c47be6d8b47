"""`hp migrate`: a YAML of the older trainer as one for HyperTrainer.

In: the older file, options on top. Out: YAML on standard output or in a file; on standard error what has no
counterpart.
"""

from __future__ import annotations

import sys
from pathlib import Path

from hp_config import HyperTrainerConfig, parse_args
from hp_protocols.errors import ConfigError, Fault
from hp_trainer.cli import messages

USAGE = """\
usage: hp migrate OLD.yaml [-o NEW.yaml] [--train.max_steps=20 …]

Write the YAML of the older trainer (sections model, data, train) as changes to a recipe, which `hp train NEW.yaml`
takes. Keys without a counterpart are listed with the reason, in the file as comments and on standard error."""


def main(arguments: list[str]) -> int:
    """Run `hp migrate <arguments>`."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if arguments else 2
    try:
        words, target = _take_target(arguments)
        args = parse_args(HyperTrainerConfig, words)
        from hp_trainer._legacy.migration import migrate

        migration = migrate(args)
        if target is None:
            print(migration.text, end="")
        else:
            _write(target, migration.text)
    except ConfigError as error:
        messages.print_mistakes("hp migrate", error)
        return 2
    for line in migration.left_out:
        print(f"hp migrate: not taken over: {line}", file=sys.stderr)
    return 0


def _take_target(arguments: list[str]) -> tuple[list[str], Path | None]:
    """The words without `-o FILE`."""
    if "-o" not in arguments:
        return arguments, None
    place = arguments.index("-o")
    if place + 1 == len(arguments):
        raise ConfigError(Fault("-o", "a value is missing", allowed="the file to write"))
    return arguments[:place] + arguments[place + 2 :], Path(arguments[place + 1])


def _write(target: Path, text: str) -> None:
    if target.exists():
        raise ConfigError(Fault(str(target), "is there already and is not written over", hint="choose another name"))
    target.write_text(text, encoding="utf-8")
