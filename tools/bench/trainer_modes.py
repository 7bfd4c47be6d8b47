"""HyperTrainer's step in Graph Mode against its eager one, on many gloo ranks, paired; goal: at most 0.9.

    OMP_NUM_THREADS=1 python tools/bench/trainer_modes.py --world 8

In: options below; what is not one of them goes to the recipe as on the command line of `hp train`. Out: medians and
paired ratios. Both trainers live in the same processes and train the recipe's model on the same data, in turns.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
from pathlib import Path

import torch
from graph_lib import in_turns, in_world, show
from trainer_lib import SteppedTrainer

from hp_config import ConfigManager
from hp_protocols.platform import get_platform


def _rank(rank: int, world: int, turns: int, recipe: list[str], folder: str) -> None:
    os.environ["LOCAL_RANK"] = str(rank)
    trainers = {}
    for name, mode in (("eager", "none"), ("graph", "graph")):
        run = str(Path(folder) / name)
        options = ("--compile.mode", mode, "--dump_folder", run, "--training.steps", str(turns + 10))
        config = ConfigManager().parse_args([*recipe, *options, "--checkpoint.enable=false"])
        trainers[name] = SteppedTrainer(config)
    steps = {name: trainer.step for name, trainer in trainers.items()}
    with contextlib.ExitStack() as stack:
        for trainer in trainers.values():
            stack.enter_context(trainer.running())
        for turn in range(3):  # also captures the graph
            losses = {name: step() for name, step in steps.items()}
            if not torch.equal(*losses.values()):
                raise SystemExit(f"the two paths differ in step {turn + 1}: {losses}")
        times = in_turns(steps, turns)
    if rank == 0:
        show(f"HyperTrainer's step, {world} ranks over gloo", times, "eager", ("graph", 0.9))
    get_platform().barrier()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, default=8)
    parser.add_argument("--turns", type=int, default=15)
    options, recipe = parser.parse_known_args()
    if "--module" not in recipe:
        recipe = [
            "--module",
            "qwen3_5_v2",
            "--config",
            "qwen3_5_v2_debugmodel",
            "--training.local_batch_size=1",
            *recipe,
        ]
    with tempfile.TemporaryDirectory() as folder:
        in_world(_rank, options.world, options.turns, recipe, folder)


if __name__ == "__main__":
    main()
