"""`hp list`: what is installed to train. In: no options. Out: modules, their recipes and flavours, without torch."""

from __future__ import annotations

from hp_config import list_recipes
from hp_protocols import list_flavors, list_specs

USAGE = "usage: hp list\n\nThe recipes (for `hp train --module M --config C`) and models that are installed."


def main(arguments: list[str]) -> int:
    """Print recipes by module, then models with their flavours."""
    if arguments:
        print(USAGE)
        return 0 if arguments[0] in ("-h", "--help") else 2
    by_module: dict[str, list[str]] = {}
    for recipe in list_recipes():
        by_module.setdefault(recipe.module, []).append(recipe.name)
    print("recipes (hp train --module MODULE --config RECIPE):")
    for module, names in sorted(by_module.items()):
        print(f"  {module}")
        for name in sorted(names):
            print(f"    {name}")
    if not by_module:
        print("  none is installed; packages offer them through the entry-point group hp_trainer.recipes")
    print("models (get_spec(name, flavor)):")
    for spec in list_specs():
        print(f"  {spec}: {', '.join(list_flavors(spec))}")
    return 0
