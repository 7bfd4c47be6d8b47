"""`hp export`: the weights of a run for transformers. In: a run folder. Out: a folder; an exit code."""

from __future__ import annotations

import logging
from pathlib import Path

from hp_trainer.cli.arguments import Arguments
from hp_trainer.cli.frame import run_command

USAGE = """\
usage: hp export RUN_FOLDER [options]

Write the weights of a run in Hugging Face format (safetensors, config.json, tokenizer), as step-N-hf.

  --to FOLDER    write it there; default: beside the run's checkpoints
  --step N       the checkpoint of that step instead of the newest
  --dtype TYPE   float32 (default), bfloat16 or float16

exit codes: 0 fine, 1 it could not be written, 2 a mistake in the command"""


def main(arguments: list[str]) -> int:
    """Run `hp export <arguments>`."""
    return run_command("hp export", USAGE, arguments, export)


def export(arguments: list[str]) -> None:
    """Read the options, write the folder, say where it is."""
    parser = Arguments("hp export")
    parser.add_argument("run_folder", metavar="RUN_FOLDER", type=Path)
    parser.flag("to", type=Path)
    parser.flag("step", type=int)
    parser.flag("dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    options = parser.parse_args(arguments)
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    from hp_trainer.weights import export_run

    path = export_run(options.run_folder, options.to, step=options.step, dtype=options.dtype)
    print(f"{path}\n\nLoad it with transformers.AutoModelForCausalLM.from_pretrained({str(path)!r})")
