"""Whether the degrees and batches of the older YAML fit a number of processes.

In: a `HyperTrainerConfig` and a world size. Out: `Fault`s with the older paths.
"""

from __future__ import annotations

import math
from typing import Any

from hp_protocols.errors import Fault

__all__ = ["layout_faults"]


def layout_faults(config: Any, world_size: int) -> list[Fault]:
    """Degrees whose product is not the world, a batch that the ranks cannot share, rows that they cannot cut."""
    train, accelerator = config.train, config.train.accelerator
    degrees = {name: getattr(accelerator, name) for name in ("dp_replicate", "cp", "tp")}
    shard, others = accelerator.shard_degree, math.prod(degrees.values())
    if shard == -1:
        shard = max(1, world_size // others)
    where = "train.accelerator"
    if others * shard != world_size:
        shown = " × ".join(f"{name} {degree}" for name, degree in {**degrees, "dp_shard": shard}.items())
        problem = f"{shown} = {others * shard}, but the world has {world_size} processes"
        hint = f"start {others * shard} processes, or let dp_shard: -1 take what the other degrees leave"
        return [Fault(where, problem, hint=hint)]
    faults = []
    ranks = accelerator.dp_replicate * shard
    if train.global_batch_size % (train.micro_batch_size * ranks):
        problem = (
            f"{train.global_batch_size} is not a multiple of micro_batch_size {train.micro_batch_size} × "
            f"{ranks} data-parallel ranks"
        )
        faults.append(Fault("train.global_batch_size", problem))
    if config.data.max_seq_len % accelerator.cp:
        problem = f"{config.data.max_seq_len} cannot be cut into {accelerator.cp} equal stretches (cp)"
        faults.append(Fault("data.max_seq_len", problem))
    return faults
