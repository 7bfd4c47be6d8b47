"""`hp import`: a Hugging Face folder as a checkpoint. In: a folder and a recipe. Out: a checkpoint; an exit code."""

from __future__ import annotations

import logging
from pathlib import Path

from hp_config import ConfigManager
from hp_protocols.errors import ConfigError
from hp_trainer.cli import messages
from hp_trainer.cli.arguments import Arguments

USAGE = """\
usage: hp import HF_FOLDER --to FOLDER --module MODULE --config RECIPE [--option value …]

Write the weights of a Hugging Face folder as FOLDER/checkpoint/step-0, for the model of a recipe. Runs start from it in
any layout with --checkpoint.initial_load_path FOLDER/checkpoint/step-0; a run that reads the Hugging Face folder itself
needs no import: --checkpoint.initial_load_path HF_FOLDER --checkpoint.initial_load_in_hf.

exit codes: 0 fine, 1 it could not be written, 2 a mistake in the command"""


def main(arguments: list[str]) -> int:
    """Run `hp import <arguments>`."""
    if not arguments or {"-h", "--help"} & set(arguments):
        print(USAGE)
        return 0 if arguments else 2
    try:
        parser = Arguments("hp import")
        parser.add_argument("hf_folder", type=Path)
        parser.flag("to", type=Path, required=True)
        options, rest = parser.parse_known_args(arguments)
        config = ConfigManager().parse_args(rest, world_size=1)
        logging.basicConfig(format="%(message)s", level=logging.WARNING)
        from hp_components import CheckpointError
        from hp_trainer.weights import import_folder

        try:
            path = import_folder(options.hf_folder, config, options.to)
        except CheckpointError as error:
            return messages.fail("hp import", str(error))
    except ConfigError as error:
        messages.print_mistakes("hp import", error)
        return 2
    print(f"{path}\n\nStart from it: hp train … --checkpoint.initial_load_path {path}")
    return 0
