"""`hp migrate`: a YAML of the older trainer as one for HyperTrainer.

In: the older file, options on top. Out: YAML on standard output or in a file; on standard error what has no
counterpart.
"""

from __future__ import annotations

import sys
from pathlib import Path

from hp_config import HyperTrainerConfig, parse_args
from hp_protocols.errors import ConfigError, Fault
from hp_trainer.cli.arguments import Arguments
from hp_trainer.cli.frame import run_command

USAGE = """\
usage: hp migrate OLD.yaml [-o NEW.yaml] [--train.max_steps=20 …]

Write the YAML of the older trainer (sections model, data, train) as changes to a recipe, which `hp train NEW.yaml`
takes. Keys without a counterpart are listed with the reason, in the file as comments and on standard error.

  -o NEW.yaml    write it there; default: on standard output
  --train.…      any key of the older file, changed before it is written anew

exit codes: 0 fine, 1 it could not be written, 2 a mistake in the command or the file"""


def main(arguments: list[str]) -> int:
    """Run `hp migrate <arguments>`."""
    return run_command("hp migrate", USAGE, arguments, rewrite)


def rewrite(arguments: list[str]) -> None:
    """Read the older file with its options, write the new one, say what has no counterpart."""
    parser = Arguments("hp migrate")
    parser.add_argument("-o", dest="target", metavar="NEW.yaml", type=Path)
    options, words = parser.parse_known_args(arguments)
    target: Path | None = options.target
    if not words or words[0].startswith("-"):
        raise ConfigError(Fault("hp migrate", "the older file is missing", hint="hp migrate OLD.yaml -o NEW.yaml"))
    if target is not None and target.exists():
        raise ConfigError(Fault(str(target), "is there already and is not written over", hint="choose another name"))
    args = parse_args(HyperTrainerConfig, words)
    from hp_trainer._legacy.migration import migrate

    migration = migrate(args)
    if target is None:
        print(migration.text, end="")
    else:
        target.write_text(migration.text, encoding="utf-8")
    for line in migration.left_out:
        print(f"hp migrate: not taken over: {line}", file=sys.stderr)
