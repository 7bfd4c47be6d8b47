"""`python -m hp_trainer …` is the command `hp …`. In: arguments. Out: an exit code."""

import sys

from hp_trainer.cli import main

sys.exit(main())
