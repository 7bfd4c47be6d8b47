"""`python -m hp_trainer …` is the command `hp …`. In: arguments. Out: an exit code."""

from hp_trainer.cli import command

command()
