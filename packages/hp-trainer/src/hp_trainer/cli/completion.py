"""`hp completion SHELL` prints a completion script; `hp complete` is what that script asks at every Tab.

In: the words typed so far. Out: candidates, one per line; none where a file name is meant. What a recipe offers is
looked up once, which loads torch, and kept in the cache for the next Tab.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
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

# What follows each command beside the options of a configuration: its own options with their fixed values.
OWN_OPTIONS: Mapping[str, Mapping[str, Sequence[str]]] = {
    "train": dict.fromkeys(("--nproc", "--nnodes", "--node-rank", "--rdzv-endpoint"), ()),
    "plan": {"--world-size": (), "--device-memory": (), "--device": tuple(DEVICES), "--json": ()},
    "config": {"--world-size": ()},
    "import": {"--to": ()},
    "migrate": {"-o": ()},
    "sample": dict.fromkeys(("--prompt", "--max_new_tokens", "--temperature", "--top_k", "--seed", "--step"), ()),
    "plot": {"--out": ()},
    "export": {"--to": (), "--step": (), "--dtype": ("float32", "bfloat16", "float16")},
    "doctor": {"--json": ()},
}
# Commands that begin with a word out of a few.
SUBCOMMANDS: Mapping[str, Sequence[str]] = {"completion": tuple(SCRIPTS), "config": ("show", "diff", "validate")}
# Commands that take the options of a recipe, or of a file.
WITH_RECIPE = ("train", "config", "plan", "import")
WITH_FILE = ("train", "config", "plan", "migrate")


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

    number, *words = arguments or [""]
    if not number.isdigit():
        return 2  # typed by hand; at a Tab there is no place to say so
    typed, current = words[1 : int(number)], (words[int(number)] if int(number) < len(words) else "")
    if current == "=" or (typed and typed[-1] == "="):
        # bash cuts `--option=value` at the sign.
        typed = typed[:-1] if typed and typed[-1] == "=" else typed
        current = "" if current == "=" else current
    found = COMMANDS if not typed else candidates(typed[0], typed[1:], current)
    print("\n".join(sorted(word for word in found if word.startswith(current))))
    return 0


def candidates(command: str, typed: Sequence[str], current: str) -> Iterable[str]:
    """What may come next after `hp <command> <typed>`; nothing where a file name or a free value is meant."""
    previous = typed[-1] if typed else ""
    own, takes_recipe = OWN_OPTIONS.get(command, {}), command in WITH_RECIPE
    module = _value_of("--module", typed)
    if takes_recipe and previous in ("--module", "--config"):
        recipes = list_recipes()
        if previous == "--module":
            return {recipe.module for recipe in recipes}
        return {recipe.name for recipe in recipes if module in (None, recipe.module)}
    if previous in own and previous != "--json":
        return own[previous]
    if not current.startswith("-") and not typed and command in SUBCOMMANDS:
        return SUBCOMMANDS[command]
    options = _options(command, typed)
    if previous in options:
        return options[previous]
    if not current.startswith("-"):
        return ()
    fixed = ("--module", "--config") if takes_recipe else ()
    return {*own, *fixed, *options, "--help"} - {word for word in typed if word in ("--module", "--config")}


def _value_of(flag: str, typed: Sequence[str]) -> str | None:
    for index, word in enumerate(typed):
        following = typed[index + 1] if index + 1 < len(typed) else None
        if word == flag and following:
            return following
        if word.startswith(f"{flag}="):
            return word.partition("=")[2]
    return None


def _options(command: str, typed: Sequence[str]) -> dict[str, list[str]]:
    """Each option of the recipe or file that was typed, with its fixed values; from the cache, or from loading it."""
    module, recipe = _value_of("--module", typed), _value_of("--config", typed)
    file = next((Path(word) for word in typed if word.endswith((".yaml", ".yml"))), None)
    if command in WITH_RECIPE and module and recipe:
        words, content = ["--module", module, "--config", recipe], b""
    elif command in WITH_FILE and file is not None and file.is_file():
        words, content = [str(file)], file.read_bytes()
    else:
        return {}
    brought_by = {found.distribution for found in list_recipes() if found.module == module and found.distribution}
    packages = sorted({"hp-trainer", "hp-components", "hp-config", "hp-models", *brought_by})
    versions = [f"{name}={metadata.version(name)}" for name in packages]
    digest = hashlib.sha256(content).hexdigest()
    kept = cache_root() / "completion" / f"{cache_key(*words, digest, *versions)}.json"
    if kept.exists():
        return dict(json.loads(kept.read_text()))
    from hp_config import ConfigManager
    from hp_config.tree import find_options

    try:
        config = ConfigManager().parse_args(words)
    except ConfigError:
        # Half a name, at a Tab: there is nothing to complete yet, and no place to say so.
        return {}
    options = {option.flag: _choices(option.annotation) for option in find_options(config).values()}
    with open_atomic(kept) as out:
        out.write(json.dumps(options).encode())
    return options


def _choices(annotation: Any) -> list[str]:
    if annotation is bool:
        return ["true", "false"]
    if get_origin(annotation) is Literal:
        return [str(choice) for choice in get_args(annotation)]
    return [choice for member in get_args(annotation) for choice in _choices(member)] if get_args(annotation) else []
