"""The `hp` command: finds the subcommand and runs it.

In: command-line arguments. Out: an exit code: 0 fine, 1 the run failed, 2 a mistake in the command or
configuration. Neither this module nor `hp --help` imports torch; only what loads a recipe does.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from importlib import import_module
from typing import NoReturn

from hp_protocols.errors import nearest
from hp_trainer.process_end import end_process

# name → (module with `main(arguments) -> int`, what it does)
COMMANDS = {
    "train": ("hp_trainer.cli.train", "train the model of a recipe; resumes a run folder that has checkpoints"),
    "plan": ("hp_trainer.cli.plan", "layout, parameters, FLOPs and memory per rank of a run, before there is one"),
    "sample": ("hp_trainer.cli.sample", "let a trained model continue a prompt"),
    "plot": ("hp_trainer.cli.plot", "the loss curves of runs, as a picture and in the terminal"),
    "export": ("hp_trainer.cli.export", "the weights of a run as a folder that transformers loads"),
    "import": ("hp_trainer.cli.import_weights", "a Hugging Face folder as a checkpoint to start training from"),
    "config": ("hp_trainer.cli.config", "show a resolved configuration, diff it with its recipe, validate it"),
    "migrate": ("hp_trainer.cli.migrate", "a YAML of the older trainer as one for HyperTrainer"),
    "list": ("hp_trainer.cli.listing", "the modules, their recipes and model flavours that are installed"),
    "doctor": ("hp_trainer.cli.doctor", "versions, devices, what is missing on this machine and how to install it"),
    "completion": ("hp_trainer.cli.completion", "the completion script of a shell"),
    "version": ("hp_trainer.cli.version", "versions of the hyper-parallel packages and of torch"),
}


def usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: hp <command> [options]",
            "",
            "Train language models, from one CPU to clusters.",
            "",
            "commands:",
            *lines,
            "",
            "`hp <command> --help` explains a command. First try:",
            "  hp train --module qwen3_5_v2 --config qwen3_5_v2_debugmodel",
        ]
    )


def command() -> NoReturn:
    """The `hp` command as a process: runs `main` and ends the process with its code."""
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:
        # `hp … | head` has read enough. What is still buffered would raise the same at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    end_process(code)


def main(argv: list[str] | None = None) -> int:
    """Run a command line; `argv` defaults to the process's arguments. Returns the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage(), file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else 2
    name, *rest = arguments
    if name == "--version":
        name = "version"
    if name == "complete":
        # Asked by the script of `hp completion` at every Tab, never typed.
        return int(import_module(COMMANDS["completion"][0]).answer(rest))
    if name not in COMMANDS:
        near = nearest(name, COMMANDS)
        hint = f"; did you mean `hp {near}`?" if near else ""
        print(
            f"hp: there is no command {name!r}{hint}\ncommands: {', '.join(COMMANDS)} (see `hp --help`)",
            file=sys.stderr,
        )
        return 2
    run: Callable[[list[str]], int] = import_module(COMMANDS[name][0]).main
    return run(rest)
