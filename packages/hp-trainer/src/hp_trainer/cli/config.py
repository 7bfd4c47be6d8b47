"""`hp config show|diff|validate`: look at a configuration without training. The work is done by hp-config."""

from __future__ import annotations

import sys

from hp_protocols.errors import nearest

USAGE = """\
usage: hp config show     --module M --config C [--option value …]   the whole configuration as YAML
       hp config diff     RUN/resolved.yaml [OTHER.yaml]             what differs from the recipe, or between two
       hp config validate RUN/resolved.yaml [--world-size N]         every mistake at once

Each also takes `--module M --config C` with options in place of a YAML file, and the other way round.

exit codes: 0 fine, 2 a mistake in the command or the configuration"""


def main(arguments: list[str]) -> int:
    """Run one of the three; prints its text and returns its exit code."""
    # Beside a recipe, --help is about its options.
    asked = bool({"-h", "--help"} & set(arguments)) and "--module" not in " ".join(arguments)
    if asked or not arguments:
        print(USAGE, file=sys.stdout if asked else sys.stderr)
        return 0 if asked else 2
    from hp_config import cli

    commands = {"show": cli.show, "diff": cli.diff, "validate": cli.validate}
    name, *rest = arguments
    if name not in commands:
        near = nearest(name, commands)
        hint = f"; did you mean `hp config {near}`?" if near else ""
        print(f"hp config: there is no command {name!r}{hint} (show, diff, validate)", file=sys.stderr)
        return 2
    code, text = commands[name](rest)
    print(text, file=sys.stderr if code else sys.stdout)
    return code
