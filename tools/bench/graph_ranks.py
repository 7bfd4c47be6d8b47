"""A step on many gloo ranks, fsdp with default settings, against eager FSDP2 with the same units; goal: at most 0.85.

    OMP_NUM_THREADS=1 python tools/bench/graph_ranks.py --world 8

In: nothing. Out: medians and paired ratios, with FSDP2's asynchronous unshard and with overlap off beside them.
"""

from __future__ import annotations

import argparse

import torch.distributed as dist
from graph_lib import Work, check_equal, distributed_contestants, in_turns, in_world, show
from torch.distributed.device_mesh import init_device_mesh


def _rank(rank: int, world: int, work: Work, turns: int) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=world)
    steps = distributed_contestants(work, init_device_mesh("cpu", (world,)), rank)
    check_equal(steps)
    times = in_turns(steps, turns)
    if rank == 0:
        show(f"step, {world} ranks over gloo, fsdp, {work}", times, "fsdp2", ("graph", 0.85))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, default=8)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--width", type=int, default=128)
    options = parser.parse_args()
    in_world(_rank, options.world, Work(6, options.width, 512, 2, 32), options.turns)


if __name__ == "__main__":
    main()
