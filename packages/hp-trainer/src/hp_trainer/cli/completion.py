"""`hp completion SHELL` prints a completion script; `hp complete` is what that script asks at every Tab.

In: the words typed so far. Out: candidates, one per line; none where a file name is meant. What a recipe offers is
looked up once, which loads torch, and kept in the cache for the next Tab.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from typing import Any, Literal, get_args, get_origin

from hp_components.data.cache import cache_key, cache_root, open_atomic
from hp_config import list_recipes
from hp_protocols.errors import ConfigError
from hp_trainer.plan import DEVICES

USAGE = """\
usage: hp completion bash|zsh|fish

Print the completion script of a shell. To use it at every start:
  bash  echo 'eval "$(hp completion bash)"' >> ~/.bashrc
  zsh   echo 'eval "$(hp completion zsh)"' >> ~/.zshrc
  fish  hp completion fish > ~/.config/fish/completions/hp.fish"""

_BASH = """\
_hp() {
  local IFS=$'\\n'
  COMPREPLY=($(hp complete "$COMP_CWORD" "${COMP_WORDS[@]}" 2>/dev/null))
}
complete -o default -F _hp hp
"""

SCRIPTS = {
    "bash": _BASH,
    "zsh": "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n" + _BASH,
    "fish": "complete -c hp -a '(hp complete (count (commandline -opc)) (commandline -opc) (commandline -ct))'\n",
}

LAUNCH = ("--nproc", "--nnodes", "--node-rank", "--rdzv-endpoint")
PLAN = ("--world-size", "--device-memory", "--device", "--json")
# Commands that take a recipe, with what they take beside its options; and what else follows a command.
WITH_RECIPE: Mapping[str, tuple[str, ...]] = {"train": LAUNCH, "config": (), "plan": PLAN}
WITH_FOLDER = ("plot", "sample")
WORDS: Mapping[str, tuple[str, ...]] = {
    "completion": tuple(SCRIPTS),
    "config": ("show", "diff", "validate"),
    "doctor": ("--json",),
    "plot": ("--out",),
    "sample": ("--prompt", "--max_new_tokens", "--temperature", "--top_k", "--seed", "--step"),
}


def main(arguments: list[str]) -> int:
    """Print the script of a shell."""
    if len(arguments) == 1 and arguments[0] in SCRIPTS:
        print(SCRIPTS[arguments[0]], end="")
        return 0
    asked = arguments in (["-h"], ["--help"])
    print(USAGE, file=sys.stdout if asked else sys.stderr)
    return 0 if asked else 2


def answer(arguments: list[str]) -> int:
    """Print the candidates for word number `arguments[0]` of the command line `arguments[1:]`."""
    from hp_trainer.cli import COMMANDS

    number, *words = arguments
    typed, current = words[1 : int(number)], (words[int(number)] if int(number) < len(words) else "")
    if current == "=" or (typed and typed[-1] == "="):
        # bash cuts `--option=value` at the sign.
        typed = typed[:-1] if typed and typed[-1] == "=" else typed
        current = "" if current == "=" else current
    found = COMMANDS if not typed else candidates(typed[0], typed[1:], current)
    print("\n".join(sorted(word for word in found if word.startswith(current))))
    return 0


def candidates(command: str, typed: Sequence[str], current: str) -> Iterable[str]:
    """What may come next after `hp <command> <typed>`."""
    previous = typed[-1] if typed else ""
    recipes = list_recipes()
    module = _value_of("--module", typed)
    if previous == "--module":
        return {recipe.module for recipe in recipes}
    if previous == "--config":
        return {recipe.name for recipe in recipes if module in (None, recipe.module)}
    if command in WITH_FOLDER and not current.startswith("-"):
        return ()
    if command not in WITH_RECIPE:
        return WORDS.get(command, ())
    if command == "plan" and previous in PLAN:
        return DEVICES if previous == "--device" else ()
    options = _options(module, _value_of("--config", typed))
    if previous in options:
        return options[previous]
    if not current.startswith("-"):
        return WORDS.get(command, ()) if not typed else ()
    fixed = ("--module", "--config", *WITH_RECIPE[command])
    return {*fixed, *options, "--help"} - {word for word in typed if word.startswith("--mod")}


def _value_of(flag: str, typed: Sequence[str]) -> str | None:
    for index, word in enumerate(typed):
        following = typed[index + 1] if index + 1 < len(typed) else None
        if word == flag and following:
            return following
        if word.startswith(f"{flag}="):
            return word.partition("=")[2]
    return None


def _options(module: str | None, recipe: str | None) -> dict[str, list[str]]:
    """Each option of a recipe with its fixed values, if it has such; from the cache, or from loading the recipe."""
    if module is None or recipe is None:
        return {}
    versions = [
        f"{name}={metadata.version(name)}" for name in ("hp-trainer", "hp-components", "hp-config", "hp-models")
    ]
    file = cache_root() / "completion" / f"{cache_key(module, recipe, *versions)}.json"
    if file.exists():
        return dict(json.loads(file.read_text()))
    from hp_config import ConfigManager
    from hp_config.tree import find_options

    try:
        config = ConfigManager().parse_args(["--module", module, "--config", recipe])
    except ConfigError:
        # Half a name, at a Tab: there is nothing to complete yet, and no place to say so.
        return {}
    options = {option.flag: _choices(option.annotation) for option in find_options(config).values()}
    with open_atomic(file) as out:
        out.write(json.dumps(options).encode())
    return options


def _choices(annotation: Any) -> list[str]:
    if annotation is bool:
        return ["true", "false"]
    if get_origin(annotation) is Literal:
        return [str(choice) for choice in get_args(annotation)]
    return [choice for member in get_args(annotation) for choice in _choices(member)] if get_args(annotation) else []
