"""Recipes are found through real entry points, listed without an import, and keep their own tracebacks."""

from __future__ import annotations

import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import toy_trainer

from hp_config import ConfigError, ConfigManager, Recipe, list_recipes

Declare = Callable[[str, dict[str, str]], Path]


def error_of(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        ConfigManager().parse_args(list(words))
    return str(caught.value)


def test_recipes_are_listed_by_module_and_name_with_their_distribution(toy_recipes: dict[str, str]) -> None:
    recipes = [recipe for recipe in list_recipes() if recipe.distribution == "toy-trainer"]
    assert [f"{recipe.module}.{recipe.name}" for recipe in recipes] == sorted(toy_recipes)
    assert Recipe("toy", "small", "toy_trainer:small", "toy-trainer") in recipes


def test_listing_imports_neither_a_recipe_nor_torch(site: Path, toy_recipes: dict[str, str]) -> None:
    code = (
        "import sys; import hp_config; print(len(hp_config.list_recipes()));"
        "assert not {'toy_trainer', 'torch', 'tyro'} & set(sys.modules), sys.modules.keys()"
    )
    environment = {"PYTHONPATH": str(site)}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) >= len(toy_recipes)


def test_a_recipe_becomes_a_config_that_knows_its_origin() -> None:
    manager = ConfigManager()
    config = manager.parse_args(["--module=toy", "--config", "wide"])
    assert config == toy_trainer.wide().replace(recipe="toy.wide")
    assert (manager.config, manager.module, manager.recipe, manager.file) == (config, "toy", "wide", None)


def test_missing_and_unknown_names_list_what_there_is() -> None:
    assert "--module: is missing; allowed: broken" in error_of("--config", "small")
    assert "--config: is missing; allowed: picky, plain_optimizer, small, wide" in error_of("--module", "toy")
    unknown = error_of("--module", "tyo", "--config", "small")
    assert "--module: no module 'tyo'; allowed: broken" in unknown
    assert "did you mean --module toy?" in unknown
    unknown = error_of("--module", "toy", "--config", "smal")
    assert unknown == (
        "--config: no recipe 'smal'; allowed: picky, plain_optimizer, small, wide\n    → did you mean --config small?"
    )
    assert "`hp list` shows all modules and recipes" in error_of("--module", "toy", "--config", "zzz")


def test_an_exception_inside_a_recipe_keeps_its_own_traceback() -> None:
    with pytest.raises(RuntimeError, match="the recipe itself is broken") as caught:
        ConfigManager().parse_args(["--module", "broken", "--config", "raises"])
    last = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert Path(last.filename).name == "toy_trainer.py"
    assert caught.value.__cause__ is None
    with pytest.raises(ModuleNotFoundError, match="toy_module_that_is_missing"):
        ConfigManager().parse_args(["--module", "broken", "--config", "no_module"])


def test_a_recipe_that_returns_something_else_is_named() -> None:
    with pytest.raises(TypeError, match=r"broken\.no_config \(toy_trainer:no_config\) must return a trainer config"):
        ConfigManager().parse_args(["--module", "broken", "--config", "no_config"])


def test_a_recipe_with_a_mistyped_value_is_refused_before_anything_starts() -> None:
    assert error_of("--module", "broken", "--config", "mistyped") == (
        "optimizer.lr: expected a number, got the text '1e-4'"
    )


def test_a_name_that_two_distributions_declare_is_refused_with_both(declare: Declare) -> None:
    declare("other-trainer", {"toy.small": "other:small", "nameless": "other:x"})
    with pytest.raises(ConfigError) as caught:
        list_recipes()
    text = str(caught.value)
    assert "--module toy --config small: is declared twice" in text
    assert "other:small by other-trainer" in text
    assert "toy_trainer:small by toy-trainer" in text
    assert "other-trainer: entry point 'nameless': is no recipe name; allowed: <module>.<recipe>" in text


def test_a_downstream_package_adds_a_recipe_by_being_installed(declare: Declare) -> None:
    folder = declare("my-recipes", {"mine.long.run": "my_recipes:run"})
    (folder / "my_recipes.py").write_text(
        "import toy_trainer\n\n\ndef run():\n    return toy_trainer.small().replace(dump_folder='mine')\n"
    )
    config = ConfigManager().parse_args(["--module", "mine", "--config", "long.run"])
    assert config.dump_folder == "mine"
