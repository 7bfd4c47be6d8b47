"""What to change where a plan does not fit a device: options that need less, one after the other, each planned again.

In: a config, its plan, the bytes that a rank may take. Out: the options that were added, and what the run needs with
them; the last one fits, or nothing here is enough.
"""

from __future__ import annotations

import copy
import math
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


Change = Callable[["HyperTrainer.Config", RunPlan, int], str | None]
"""Change a config so that it needs less; the option that says so, or None where there is nothing to change. It is given
the plan before the change, and the bytes that a rank may take."""


def advise(config: HyperTrainer.Config, plan: RunPlan, usable: int, *, device_type: str = "cuda") -> list[Remedy]:
    """Add options until a rank takes no more than `usable` bytes, or none is left that helps.

    Changes of the batch or of the number of processes come last: they change the training, or what it costs.
    """
    found: list[tuple[Change, Remedy]] = []
    # Where the states alone do not fit, whatever is saved on activations comes after them.
    first = (_shard_copies, _more_processes) if plan.memory.peak.of(STATES) > usable else ()
    for change in (*first, *_CHANGES):
        while plan.memory.total > usable:
            changed = copy.deepcopy(config)
            option = change(changed, plan, usable)
            if option is None:
                break
            world_size = plan.layout.world_size * (_factor(plan, usable) if change is _more_processes else 1)
            try:
                better = plan_run(changed, world_size, device_type=device_type)
            except ConfigError:
                break  # this change is not to be had here
            if better.memory.total > plan.memory.total * (1 - WORTHWHILE):
                break
            config, plan = changed, better
            if found and found[-1][0] is change:
                found.pop()  # half of the half says it all
            found.append((change, Remedy(option, world_size, plan.memory.total)))
    return [remedy for _, remedy in found]


def _recompute(config: HyperTrainer.Config, plan: RunPlan, usable: int) -> str | None:
    if config.activation_checkpoint.mode == "full":
        return None
    config.activation_checkpoint.mode = "full"
    return "--activation_checkpoint.mode full"


def _chunk_loss(config: HyperTrainer.Config, plan: RunPlan, usable: int) -> str | None:
    if getattr(config.loss, "num_chunks", None) != 0:
        return None
    config.loss.num_chunks = 8  # type: ignore[attr-defined]
    return "--loss.num_chunks 8"


def _half_precision(config: HyperTrainer.Config, plan: RunPlan, usable: int) -> str | None:
    if config.training.mixed_precision_param != "float32":
        return None
    config.training.mixed_precision_param = "bfloat16"
    return "--training.mixed_precision_param bfloat16"


def _shard_copies(config: HyperTrainer.Config, plan: RunPlan, usable: int) -> str | None:
    parallelism = config.parallelism
    if parallelism.data_parallel_replicate_degree == 1:
        return None
    parallelism.data_parallel_replicate_degree, parallelism.data_parallel_shard_degree = 1, -1
    return "--parallelism.data_parallel_replicate_degree 1 --parallelism.data_parallel_shard_degree -1"


def _fewer_rows(config: HyperTrainer.Config, plan: RunPlan, usable: int) -> str | None:
    """Half the rows at once; the step stays what it is, in more micro-batches."""
    training, rows = config.training, config.training.local_batch_size
    if rows % 2:
        return None
    training.local_batch_size, training.global_batch_size = rows // 2, plan.layout.global_rows
    return f"--training.local_batch_size {rows // 2} --training.global_batch_size {plan.layout.global_rows}"


def _more_processes(config: HyperTrainer.Config, plan: RunPlan, usable: int) -> str | None:
    """As many as would bring the states down; the step keeps its rows if they can be shared out."""
    factor, layout = _factor(plan, usable), plan.layout
    if factor == 1:
        return None
    option = f"--world-size {layout.world_size * factor}"
    if config.parallelism.data_parallel_shard_degree != -1:
        config.parallelism.data_parallel_shard_degree *= factor
        option += f" --parallelism.data_parallel_shard_degree {config.parallelism.data_parallel_shard_degree}"
    at_once = layout.global_rows // layout.micro_batches * factor
    if config.training.global_batch_size != -1 and config.training.global_batch_size % at_once:
        config.training.global_batch_size = -1
        option += " --training.global_batch_size -1"
    return option


def _factor(plan: RunPlan, usable: int) -> int:
    """How many times the processes, a power of two; 1: what does not shrink with them is too much already."""
    states = plan.memory.peak.of(STATES)
    left = usable - (plan.memory.total - states)
    return 1 if left <= 0 or not states else max(2, 2 ** math.ceil(math.log2(states / left)))


_CHANGES: tuple[Change, ...] = (
    _chunk_loss,
    _recompute,
    _half_precision,
    _shard_copies,
    _fewer_rows,
    _more_processes,
)
