"""One rank of a training run: `python -m hp_trainer.train …`, alone or started by torchrun or `hp train --nproc`.

In: the options of `hp train`. Out: exit code 0, 1 (the run failed) or 2 (a mistake in the configuration).
"""

from __future__ import annotations

import logging
import os
import sys

from hp_trainer.cli.train import run_rank
from hp_trainer.launch import inside_torchrun


def main() -> int:
    return run_rank(sys.argv[1:])


def end_now(code: int) -> None:
    """End this rank without unwinding the interpreter.

    Everything of the run is closed by now. Unwinding was seen to abort now and then in a communication thread of
    torch (SIGABRT, "terminate called without an active exception"), which the launcher takes for a failed run.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    exit_code = main()
    if inside_torchrun():
        end_now(exit_code)
    sys.exit(exit_code)
