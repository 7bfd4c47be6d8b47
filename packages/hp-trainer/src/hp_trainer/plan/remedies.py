"""What to change where a plan does not fit a device: options that need less, one after the other, each planned again.

In: a config, its plan, the bytes that a rank may take. Out: the options that were added, and what the run needs with
them; the last one fits, or nothing here is enough.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hp_protocols.errors import ConfigError
from hp_trainer.plan.held import STATES
from hp_trainer.plan.run_plan import RunPlan, plan_run

if TYPE_CHECKING:
    from hp_trainer.hyper_trainer import HyperTrainer

__all__ = ["Remedy", "advise"]

WORTHWHILE = 0.02
"""A change that saves less than this share is not told of."""


@dataclass(frozen=True, slots=True)
class Remedy:
    """An option to add to those before it, the number of processes with it, and bytes per rank with all of them."""

    option: str
    world_size: int
    total: int


Change = Callable[["HyperTrainer.Config", int], tuple[str, int] | None]


def advise(config: HyperTrainer.Config, world_size: int, plan: RunPlan, usable: int) -> list[Remedy]:
    """Add options until a rank takes no more than `usable` bytes, or none is left that helps.

    Changes of the batch or of the number of processes come last: they change the training, or what it costs.
    """
    config = copy.deepcopy(config)
    found: list[Remedy] = []
    total = plan.memory.total
    changes = list(_CHANGES)
    if sum(plan.memory.peak.of([use]) for use in STATES) > usable and not plan.memory.host:
        # Whatever is saved on activations, the states alone do not fit.
        changes = [_SHARD, _MORE_PROCESSES, *(c for c in changes if c not in (_SHARD, _MORE_PROCESSES))]
    for change in changes:
        while total > usable:
            changed = copy.deepcopy(config)
            option = change(changed, world_size)
            if option is None:
                break
            try:
                needed = plan_run(changed, option[1]).memory.total
            except ConfigError:
                break  # this change is not to be had here
            if needed > total * (1 - WORTHWHILE):
                break
            config, world_size, total = changed, option[1], needed
            found.append(Remedy(*option, total))
    return found


def _recompute(config: HyperTrainer.Config, world_size: int) -> tuple[str, int] | None:
    if config.activation_checkpoint.mode == "full":
        return None
    config.activation_checkpoint.mode = "full"
    return "--activation_checkpoint.mode full", world_size


def _chunk_loss(config: HyperTrainer.Config, world_size: int) -> tuple[str, int] | None:
    if getattr(config.loss, "num_chunks", None) != 0 or config.compile.mode == "graph":
        return None
    config.loss.num_chunks = 8  # type: ignore[attr-defined]
    return "--loss.num_chunks 8", world_size


def _half_precision(config: HyperTrainer.Config, world_size: int) -> tuple[str, int] | None:
    if config.training.mixed_precision_param != "float32":
        return None
    config.training.mixed_precision_param = "bfloat16"
    return "--training.mixed_precision_param bfloat16", world_size


def _shard_copies(config: HyperTrainer.Config, world_size: int) -> tuple[str, int] | None:
    parallelism = config.parallelism
    if parallelism.data_parallel_replicate_degree == 1:
        return None
    parallelism.data_parallel_replicate_degree, parallelism.data_parallel_shard_degree = 1, -1
    return "--parallelism.data_parallel_replicate_degree 1 --parallelism.data_parallel_shard_degree -1", world_size


def _fewer_rows(config: HyperTrainer.Config, world_size: int) -> tuple[str, int] | None:
    """Half the rows at once; the step stays what it is, in more micro-batches."""
    training, rows = config.training, config.training.local_batch_size
    if rows % 2:
        return None
    parallelism = config.parallelism
    shared = parallelism.tensor_parallel_degree * parallelism.context_parallel_degree
    if training.global_batch_size == -1:
        training.global_batch_size = rows * (world_size // shared // parallelism.pipeline_parallel_degree)
    training.local_batch_size = rows // 2
    option = f"--training.local_batch_size {rows // 2} --training.global_batch_size {training.global_batch_size}"
    return option, world_size


def _more_processes(config: HyperTrainer.Config, world_size: int) -> tuple[str, int] | None:
    parallelism = config.parallelism
    if parallelism.data_parallel_shard_degree != -1:
        parallelism.data_parallel_shard_degree *= 2
    if config.training.global_batch_size != -1:
        # Twice the ranks read twice the rows, unless a step has micro-batches to give.
        config.training.global_batch_size = -1
    return f"--world-size {world_size * 2}", world_size * 2


_SHARD, _MORE_PROCESSES = _shard_copies, _more_processes
_CHANGES: tuple[Change, ...] = (
    _chunk_loss,
    _recompute,
    _half_precision,
    _shard_copies,
    _fewer_rows,
    _more_processes,
)
