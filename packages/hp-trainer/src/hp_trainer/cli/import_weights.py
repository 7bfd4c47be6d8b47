"""`hp import`: a Hugging Face folder as a checkpoint. In: a folder and a recipe. Out: a checkpoint; an exit code."""

from __future__ import annotations

import logging
from pathlib import Path

from hp_config import ConfigManager
from hp_protocols.errors import ConfigError, Fault
from hp_trainer.cli.arguments import Arguments
from hp_trainer.cli.frame import run_command

USAGE = """\
usage: hp import HF_FOLDER --to FOLDER --module MODULE --config RECIPE [--option value …]

Write the weights of a Hugging Face folder as FOLDER/checkpoint/step-0, for the model of a recipe. Runs start from it in
any layout with --checkpoint.initial_load_path FOLDER/checkpoint/step-0; a run that reads the Hugging Face folder itself
needs no import: --checkpoint.initial_load_path HF_FOLDER --checkpoint.initial_load_in_hf.

exit codes: 0 fine, 1 it could not be written, 2 a mistake in the command"""


def main(arguments: list[str]) -> int:
    """Run `hp import <arguments>`."""
    return run_command("hp import", USAGE, arguments, import_weights)


def import_weights(arguments: list[str]) -> None:
    """Read the options, those of the recipe too, write the checkpoint, say how to start from it."""
    parser = Arguments("hp import")
    parser.add_argument("hf_folder", metavar="HF_FOLDER", type=Path)
    parser.flag("to", type=Path, required=True)
    options, rest = parser.parse_known_args(arguments)
    if not options.hf_folder.is_dir():
        raise ConfigError(Fault(str(options.hf_folder), "is no folder", allowed="one with safetensors and config.json"))
    config = ConfigManager().parse_args(rest, world_size=1)
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    from hp_trainer.weights import import_folder

    path = import_folder(options.hf_folder, config, options.to)
    print(f"{path}\n\nStart from it: hp train … --checkpoint.initial_load_path {path}")
