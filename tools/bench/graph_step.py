"""A step on one process against plain eager forward and backward; goal: at most 1.00, judged at 1.03.

    OMP_NUM_THREADS=1 python tools/bench/graph_step.py

In: nothing. Out: medians and paired ratios for a small step (Python's part shows) and for a larger one.
"""

from __future__ import annotations

import argparse
import copy

import torch
from graph_lib import Work, check_equal, eager_step, graph_step, in_turns, show


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=51, help="of the largest step; smaller ones take more")
    turns = parser.parse_args().turns
    torch.set_num_threads(1)
    sizes = {Work(4, 32, 128, 2, 16): 8, Work(4, 64, 512, 2, 32): 4, Work(4, 256, 512, 4, 64): 1}
    for work, more in sizes.items():
        model, batch = work.model(), work.batch()
        steps = {"eager": eager_step(copy.deepcopy(model), batch), "graph": graph_step(model, batch)}
        check_equal(steps)
        show(f"step, 1 process, {work}", in_turns(steps, more * turns), "eager", ("graph", 1.03))


if __name__ == "__main__":
    main()
