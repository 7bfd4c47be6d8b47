"""Recipes: functions that return a complete trainer config, found through installed packages' entry points.

In: the entry-point group `hp_trainer.recipes`, whose names read `<module>.<recipe>`. Out: `Recipe`s, listed without
importing anything; `load` imports the one that was asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from hp_config.fields import is_node
from hp_protocols.errors import ConfigError, Fault, nearest

__all__ = ["RECIPE_GROUP", "Recipe", "find_recipe", "list_recipes"]

RECIPE_GROUP = "hp_trainer.recipes"


@dataclass(frozen=True, slots=True)
class Recipe:
    """One recipe: `--module module --config name`, the function behind it, and who brought it.

    Attributes:
        module: the first part of the entry point's name.
        name: the rest of it.
        function: where the function lives, as `package.module:function`.
        distribution: the installed distribution that declares it; empty where that is unknown.
    """

    module: str
    name: str
    function: str
    distribution: str

    def load(self) -> Any:
        """Import the recipe's module and call it.

        Raises:
            TypeError: the function does not return a config.
            Exception: whatever the recipe's own module or function raises, with its own traceback.
        """
        config = EntryPoint(f"{self.module}.{self.name}", self.function, RECIPE_GROUP).load()()
        if not is_node(config):
            raise TypeError(
                f"the recipe {self.module}.{self.name} ({self.function}) must return a trainer config, "
                f"not {type(config).__name__}"
            )
        return config


def list_recipes() -> list[Recipe]:
    """All recipes of all installed packages, sorted by module and name; nothing is imported.

    Raises:
        ConfigError: two packages declare the same name for different functions, or a name has no module part.
    """
    found: dict[tuple[str, str], Recipe] = {}
    faults: list[Fault] = []
    for point in entry_points(group=RECIPE_GROUP):
        distribution = point.dist.name if point.dist else ""
        module, dot, name = point.name.partition(".")
        if not dot:
            faults.append(
                Fault(f"{distribution}: entry point {point.name!r}", "is no recipe name", allowed="<module>.<recipe>")
            )
            continue
        recipe = Recipe(module, name, point.value, distribution)
        known = found.setdefault((module, name), recipe)
        # The same distribution can be seen twice, when sys.path holds two ways to it.
        if known.function != recipe.function:
            faults.append(
                Fault(
                    f"--module {module} --config {name}",
                    f"is declared twice: {known.function} by {known.distribution} and "
                    f"{recipe.function} by {recipe.distribution}",
                    hint="uninstall or rename one of them",
                )
            )
    if faults:
        raise ConfigError(faults)
    return [found[key] for key in sorted(found)]


def find_recipe(module: str | None, name: str | None) -> Recipe:
    """The recipe that `--module` and `--config` name.

    Raises:
        ConfigError: one of them is missing or unknown; it lists what there is.
    """
    recipes = list_recipes()
    modules = sorted({recipe.module for recipe in recipes})
    if module is None:
        raise ConfigError(
            Fault("--module", "is missing", allowed=_names(modules), hint=f"--module {_first(modules)} --config NAME")
        )
    if module not in modules:
        raise ConfigError(_unknown("--module", module, modules))
    names = [recipe.name for recipe in recipes if recipe.module == module]
    if name is None:
        raise ConfigError(
            Fault("--config", "is missing", allowed=_names(names), hint=f"--module {module} --config {names[0]}")
        )
    for recipe in recipes:
        if (recipe.module, recipe.name) == (module, name):
            return recipe
    raise ConfigError(_unknown("--config", name, names))


def _unknown(flag: str, given: str, known: Sequence[str]) -> Fault:
    guess = nearest(given, known)
    hint = f"did you mean {flag} {guess}?" if guess else "`hp list` shows all modules and recipes"
    kind = "module" if flag == "--module" else "recipe"
    return Fault(flag, f"no {kind} {given!r}", allowed=_names(known), hint=hint)


def _names(names: Sequence[str]) -> str:
    return ", ".join(names) or "none is installed (pip install hp-trainer brings some)"


def _first(names: Sequence[str]) -> str:
    return names[0] if names else "NAME"
