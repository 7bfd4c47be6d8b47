"""`hp config show | diff | validate` as plain functions, for the command `hp` and for tests.

In: the words after the subcommand. Out: an exit code (0 fine, 2 a mistake in the configuration) and a text to print.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hp_config.command_line import MissingExtraError
from hp_config.difference import diff_configs
from hp_config.manager import ConfigManager
from hp_config.recipes import find_recipe
from hp_config.yaml_config import dump_yaml
from hp_protocols.errors import ConfigError, Fault

__all__ = ["Command", "CommandResult", "diff", "show", "validate"]

CommandResult = tuple[int, str]
Command = Callable[[Sequence[str]], CommandResult]
WORLD_SIZE_FLAG = "--world-size"


def show(argv: Sequence[str]) -> CommandResult:
    """The whole configuration of a recipe or file with its options applied, as the YAML that a run would save."""
    return _run(lambda: _show(argv))


def diff(argv: Sequence[str]) -> CommandResult:
    """What a file, or a recipe with options, changes against its recipe; with two files, what the second changes."""
    return _run(lambda: _diff(argv))


def validate(argv: Sequence[str]) -> CommandResult:
    """Whether a file, or a recipe with options, could run; `--world-size N` also checks the parallel degrees."""
    return _run(lambda: _validate(argv))


def _show(argv: Sequence[str]) -> str:
    manager = ConfigManager()
    config = manager.parse_args(argv)
    return dump_yaml(config, module=manager.module, recipe=manager.recipe).rstrip("\n")


def _diff(argv: Sequence[str]) -> str:
    files = [word for word in argv[:2] if not word.startswith("-")]
    if len(files) == 2:
        # Options after two files change the second one.
        left_name, right_name = files
        left = ConfigManager().parse_args([files[0]])
        right = ConfigManager().parse_args(argv[1:])
    else:
        manager = ConfigManager()
        right = manager.parse_args(argv)
        if manager.module is None or manager.recipe is None:
            raise ConfigError(
                Fault(str(manager.file), "does not name its recipe (module, config)", hint="give a second file")
            )
        left_name, right_name = f"recipe {manager.module}.{manager.recipe}", str(manager.file or "options")
        left = _recipe_config(manager.module, manager.recipe)
    differences = diff_configs(left, right)
    if not differences:
        return f"{right_name} says the same as {left_name}"
    return "\n".join([f"{left_name} → {right_name}", *(f"  {difference}" for difference in differences)])


def _recipe_config(module: str, recipe: str) -> Any:
    """The recipe as a run would take it: checked, its warm-up clamped."""
    try:
        return ConfigManager().parse_args(["--module", module, "--config", recipe])
    except MissingExtraError:
        # Without tyro there are no options, but a recipe can still be compared with.
        return find_recipe(module, recipe).load()


def _validate(argv: Sequence[str]) -> str:
    words, world_size = _take_world_size(argv)
    manager = ConfigManager()
    manager.parse_args(words, world_size=world_size)
    name = str(manager.file) if manager.file else f"{manager.module}.{manager.recipe}"
    layout = f" on {world_size} process{'' if world_size == 1 else 'es'}" if world_size else ""
    return f"{name} is valid{layout}"


def _take_world_size(argv: Sequence[str]) -> tuple[list[str], int | None]:
    words, given = list(argv), None
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") == WORLD_SIZE_FLAG:
            given = value if equals else "".join(words[index + 1 : index + 2])
            del words[index : index + (1 if equals else 2)]
            break
    if given is None:
        return words, None
    if not given.isdigit() or int(given) < 1:
        raise ConfigError(Fault(WORLD_SIZE_FLAG, f"{given!r} is no number of processes", allowed="at least 1"))
    return words, int(given)


def _run(command: Callable[[], str]) -> CommandResult:
    try:
        return 0, command()
    except ConfigError as error:
        count = len(error.faults)
        return 2, f"{count} mistake{'' if count == 1 else 's'} in the configuration:\n{error}"
    except MissingExtraError as error:
        return 2, str(error)
