"""Peak live bytes of a step against eager FSDP2, 8 equal blocks; goals: at most 1.00, and 0.95 with overlap off.

    OMP_NUM_THREADS=1 python tools/bench/graph_memory.py

In: nothing. Out: peaks as torch's MemTracker counts them, on rank 0. The batch is such that activations weigh about
what parameters weigh; parameters here are the shards, gradients and gathered parameters come in the step.
"""

from __future__ import annotations

import argparse
import copy
import gc

import torch.distributed as dist
from graph_lib import Step, Work, check_equal, fsdp2_step, graph_step, judge
from graph_lib import in_world as run_in_world
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import init_device_mesh


def peak_bytes(step: Step) -> int:
    step()  # compiled and warm: what is measured is a step of many
    for parameter in step.model.parameters():  # type: ignore[attr-defined]
        parameter.grad = None
    gc.collect()
    tracker = MemTracker()
    tracker.track_external(step.model)  # type: ignore[attr-defined]
    with tracker:
        step()
    return max(entry["Total"] for entry in tracker.get_tracker_snapshot("peak").values())


def _rank(rank: int, world: int, work: Work) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    model, batch = work.model(), work.batch(rank)
    whole = sum(parameter.nbytes for parameter in model.parameters())
    steps = {
        "fsdp2": fsdp2_step(copy.deepcopy(model), batch, mesh),
        "graph": graph_step(copy.deepcopy(model), batch),
        "graph, overlap off": graph_step(copy.deepcopy(model), batch, enable_overlap=False),
        "graph, reshard off": graph_step(copy.deepcopy(model), batch, fsdp_reshard_after_forward=False),
    }
    check_equal(steps)
    peaks = {name: peak_bytes(step) for name, step in steps.items()}
    if rank == 0:
        print(f"peak live bytes of a step, {world} ranks, {work}, {whole / 2**20:.1f} MiB of parameters")
        for name, peak in peaks.items():
            print(f"  {name:22s} {peak / 2**20:9.3f} MiB   ratio to fsdp2: {peak / peaks['fsdp2']:.3f}")
        judge("graph", peaks["graph"] / peaks["fsdp2"], 1.0, "fsdp2")
        judge("graph, overlap off", peaks["graph, overlap off"] / peaks["fsdp2"], 0.95, "fsdp2")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--length", type=int, default=96, help="tokens per row: activations grow with it")
    options = parser.parse_args()
    run_in_world(_rank, options.world, Work(8, 192, 256, 2, options.length))


if __name__ == "__main__":
    main()
