"""Overlap: 2 ranks whose collectives take a set time without the CPU, against eager FSDP2; goal: at most 0.75.

    OMP_NUM_THREADS=1 python tools/bench/graph_delayed.py

In: nothing. Out: medians and paired ratios where the delays of a step total half of its compute, and twice.
Compute is forward and backward of the whole model on each rank without any communication. The wire's speed is set
so that FSDP2's bytes take that time; each contestant's own time on the wire is printed.
"""

from __future__ import annotations

import argparse
import copy

import torch
import torch.distributed as dist
from delay_group import Wire, init_delay_group
from graph_lib import Step, Work, check_equal, distributed_contestants, eager_step, in_turns, in_world, show
from torch.distributed.device_mesh import init_device_mesh


def _rank(rank: int, world: int, work: Work, turns: int, latency: float) -> None:
    init_delay_group(rank, world)
    alone = eager_step(copy.deepcopy(work.model()), work.batch(rank))
    steps = distributed_contestants(work, init_device_mesh("cpu", (world,)), rank)
    check_equal(steps)
    compute = in_turns({"alone": alone}, turns)["alone"].median
    nbytes = {name: _bytes_of(step) for name, step in steps.items()}
    for factor in (0.5, 2.0):
        agreed = torch.tensor([factor * compute / nbytes["fsdp2"], compute], dtype=torch.float64)
        dist.broadcast(agreed, 0)
        Wire.seconds_per_byte, Wire.seconds_per_collective = float(agreed[0]), latency
        check_equal(steps)
        times = in_turns(steps, turns)
        if rank == 0:
            wire = ", ".join(f"{name} {count * Wire.seconds_per_byte * 1e3:.0f} ms" for name, count in nbytes.items())
            title = f"{world} ranks, delays of {factor} × compute ({float(agreed[1]) * 1e3:.0f} ms), {work}"
            show(title, times, "fsdp2", ("graph", 0.75))
            print(f"  on the wire per step: {wire}")
        Wire.seconds_per_byte = Wire.seconds_per_collective = 0.0


def _bytes_of(step: Step) -> int:
    Wire.nbytes = 0
    step()
    return Wire.nbytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument(
        "--latency", type=float, default=0.0, help="seconds that each collective takes besides its bytes"
    )
    options = parser.parse_args()
    in_world(_rank, 2, Work(8, 192, 512, 2, 64), options.turns, options.latency)


if __name__ == "__main__":
    main()
