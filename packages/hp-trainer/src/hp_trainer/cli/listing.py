"""`hp list`: what is installed to train. In: no options. Out: modules, their recipes and flavours, without torch."""

from __future__ import annotations

import re
import sys

from hp_config import list_recipes
from hp_protocols import list_flavors, list_specs
from hp_protocols.errors import ConfigError
from hp_trainer.cli import messages

USAGE = """\
usage: hp list

The recipes (for `hp train --module M --config C`) and models that are installed, of this and of other packages.

exit codes: 0 fine, 1 a package offers something that cannot be listed, 2 a mistake in the command"""


def main(arguments: list[str]) -> int:
    """Print recipes by module, then models with their flavours."""
    if arguments:
        asked = arguments in (["-h"], ["--help"])
        print(USAGE, file=sys.stdout if asked else sys.stderr)
        return 0 if asked else 2
    try:
        recipes, specs = list_recipes(), list_specs()
    except ConfigError as error:
        # Two packages that claim one name; which of them is meant, nobody can say.
        return messages.fail("hp list", str(error))
    by_module: dict[str, list[str]] = {}
    for recipe in recipes:
        by_module.setdefault(recipe.module, []).append(recipe.name)
    print("recipes (hp train --module MODULE --config RECIPE):")
    for module, names in sorted(by_module.items()):
        print(f"  {module}")
        for name in sorted(names, key=_by_size):
            print(f"    {name}")
    if not by_module:
        print("  none is installed; packages offer them through the entry-point group hp_trainer.recipes")
    print("models (get_spec(name, flavor)):")
    return max([_print_model(spec) for spec in specs], default=0)


def _print_model(spec: str) -> int:
    try:
        flavors = list_flavors(spec)
    except Exception as error:  # whatever another package raises while it is imported; the others are still listed
        notes = "; ".join(getattr(error, "__notes__", []))
        return messages.fail("hp list", f"{spec}: {type(error).__name__}: {error}" + (f" ({notes})" if notes else ""))
    print(f"  {spec}: {', '.join(flavors) or 'its flavours are not told'}")
    return 0


def _by_size(name: str) -> list[tuple[int, str]]:
    """Numbers in a name count as numbers: 9b comes before 27b."""
    parts = re.split(r"(\d+)", name)
    return [(int(part), "") if index % 2 else (0, part) for index, part in enumerate(parts)]
