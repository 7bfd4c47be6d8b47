"""One rank of a training run: `python -m hp_trainer.train …`, alone or started by torchrun or `hp train --nproc`.

In: the options of `hp train`. Out: exit code 0, 1 (the run failed) or 2 (a mistake in the configuration).
"""

from __future__ import annotations

import sys

from hp_trainer.cli.train import run_rank
from hp_trainer.process_end import end_process


def main() -> int:
    return run_rank(sys.argv[1:])


if __name__ == "__main__":
    end_process(main())
