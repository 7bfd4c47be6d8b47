"""The plan of a run: its layout, sizes, FLOPs, and one rank's memory through a step.

In: a checked `HyperTrainer.Config`, a number of processes. Out: a `RunPlan`. A deep model is planned from a few of its
layers (`hp_trainer.plan.layers`), so that the largest takes seconds.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hp_config import check_layout
from hp_protocols import BaseModel, Configurable
from hp_protocols.distributed import ParallelDims
from hp_protocols.errors import ConfigError, Fault
from hp_trainer._torch_compat import number_errors
from hp_trainer.cross_checks import cross_faults
from hp_trainer.model_building import model_config_of
from hp_trainer.plan.held import STATES, Held, Interval, Use
from hp_trainer.plan.layers import Shortening, shorten
from hp_trainer.plan.pretended_step import LocalSizes, Trace, local_sizes, on_cpu, trace_step
from hp_trainer.training_step import count_micro_batches

if TYPE_CHECKING:
    from hp_trainer.hyper_trainer import HyperTrainer

__all__ = ["Layout", "Memory", "Parameters", "RunPlan", "plan_run"]


@dataclass(frozen=True, slots=True)
class Layout:
    """How the processes share the work, and what a step is made of.

    Attributes:
        local_rows: rows of one micro-batch of one data-parallel rank.
        micro_batches: of each rank in a step.
    """

    world_size: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    pp: int
    ep: int
    seq_len: int
    local_rows: int
    micro_batches: int

    @property
    def global_rows(self) -> int:
        return self.local_rows * self.micro_batches * self.dp_replicate * self.dp_shard

    @property
    def tokens_per_step(self) -> int:
        return self.global_rows * self.seq_len


@dataclass(frozen=True, slots=True)
class Parameters:
    """Elements of the model's parameters; a tied one counts once, as embedding. `rank_max` and `rank_min`: of the rank
    that holds most, and least."""

    total: int
    embedding: int
    rank_max: int
    rank_min: int

    @property
    def non_embedding(self) -> int:
        return self.total - self.embedding


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on the device of the rank that holds most.

    Attributes:
        peak: what is held at the highest point of a step.
        peak_at: where in the step that is.
        states: what stays from step to step, gradients as they are before the update.
        host: what is kept in the host's memory instead (training.enable_cpu_offload).
    """

    peak: Held
    peak_at: str
    states: Held
    host: int

    @property
    def total(self) -> int:
        return self.peak.total


@dataclass(frozen=True, slots=True)
class RunPlan:
    """What `hp plan` tells. `flops_per_token` is forward and backward, the figure that MFU is computed with."""

    model: str
    layout: Layout
    parameters: Parameters
    flops_per_token: int
    memory: Memory
    notes: tuple[str, ...]

    @property
    def flops_per_step(self) -> int:
        return self.flops_per_token * self.layout.tokens_per_step


def plan_run(
    config: HyperTrainer.Config, world_size: int, *, device_type: str = "cuda", whole: bool = False
) -> RunPlan:
    """Plan a run; `config` is not changed, and nothing is read from its data or written to its folder.

    Args:
        device_type: cuda or npu, where optimizers have other kernels.
        whole: run every layer instead of those that differ; slow, the same figures.

    Raises:
        ConfigError: what `hp train` would refuse of the layout, the model, the loss or the optimizer; or the model or
            the loss reads numbers from tensors, which a plan has none of.
    """
    if faults := [*check_layout(config, world_size), *cross_faults(config)]:
        raise ConfigError(faults)
    spec = config.model_spec
    model_config = model_config_of(spec, world_size)
    notes = _notes(config)
    planned = _as_planned(config, device_type)
    model_config.update_from_config(trainer_config=planned)
    total, embedding, flops = _sizes(planned, model_config)
    layers = _layer_list(model_config)
    shortening = _shorten(model_config, layers, whole)
    if shortening is not None and layers is not None:
        kept = [getattr(model_config, layers)[index] for index in shortening.kept]
        setattr(model_config, layers, kept)
    with on_cpu():
        least = local_sizes(planned, model_config, layers, world_size, world_size - 1)
        try:
            trace = trace_step(planned, model_config, layers, world_size)
        except number_errors() as error:
            problem = f"{spec.name}, or the loss, reads numbers from tensors, of which a plan has none: {error}"
            raise ConfigError(Fault("model_spec", problem, hint="compute with tensors where .item() stands")) from error
    return RunPlan(
        model=f"{spec.name}/{spec.flavor}",
        layout=_layout(planned, world_size),
        parameters=Parameters(total, embedding, _whole(trace.sizes, shortening), _whole(least, shortening)),
        flops_per_token=flops,
        memory=_memory(trace, shortening, offload=config.training.enable_cpu_offload),
        notes=notes,
    )


def _notes(config: HyperTrainer.Config) -> tuple[str, ...]:
    notes = []
    if config.compile.mode == "graph":
        notes.append("compile.mode graph is planned as the eager step: the same states, its own activations")
    elif config.compile.mode == "blocks":
        notes.append("compile.mode blocks is planned without compilation, which mostly needs less for activations")
    return tuple(notes)


def _as_planned(config: HyperTrainer.Config, device_type: str) -> HyperTrainer.Config:
    """The config for a pretended step: nothing is compiled, shards stay where they can be seen, and the optimizer
    steps on the cpu as it would on the device."""
    planned = copy.deepcopy(config)
    planned.compile.mode = "none"
    planned.training.enable_cpu_offload = False
    optimizer = planned.optimizer
    if optimizer.foreach is None and not optimizer.in_backward:
        takes = inspect.signature(getattr(torch.optim, optimizer.name)).parameters
        fused = optimizer.fused or (optimizer.fused is None and device_type == "cuda" and "fused" in takes)
        # A fused kernel needs no memory; on the cpu one parameter after the other is next to it.
        optimizer.foreach, optimizer.fused = ("foreach" in takes and not fused) or None, None
    return planned


def _layout(config: HyperTrainer.Config, world_size: int) -> Layout:
    dims = ParallelDims.from_config(config.parallelism, world_size)
    training = config.training
    return Layout(
        world_size=world_size,
        dp_replicate=dims.dp_replicate,
        dp_shard=dims.dp_shard,
        cp=dims.cp,
        tp=dims.tp,
        pp=dims.pp,
        ep=dims.ep,
        seq_len=training.seq_len,
        local_rows=training.local_batch_size,
        micro_batches=count_micro_batches(training, dims.batch),
    )


def _sizes(config: HyperTrainer.Config, model_config: BaseModel.Config) -> tuple[int, int, int]:
    """Parameters of the whole model, those of embeddings, and FLOPs per token."""
    model = model_config.build_on_meta(config.training.dtype)
    model.verify_module_protocol()
    total, flops = model_config.get_nparams_and_flops(model, config.training.seq_len)
    tables = {id(m.weight): m.weight.numel() for m in model.modules() if isinstance(m, nn.Embedding)}
    return total, sum(tables.values()), flops


# ---- layers ---------------------------------------------------------------------------------------------------


def _layer_list(model_config: BaseModel.Config) -> str | None:
    """The name of the model's list of layers: its longest list of configs."""
    lists = {
        field.name: value
        for field in dataclasses.fields(model_config)
        if isinstance(value := getattr(model_config, field.name), list)
        and value
        and all(isinstance(item, Configurable.Config) for item in value)
    }
    return max(lists, key=lambda name: len(lists[name]), default=None)


def _shorten(model_config: BaseModel.Config, layers: str | None, whole: bool) -> Shortening | None:
    if layers is None:
        return None
    configs = getattr(model_config, layers)
    if whole:
        return Shortening(tuple(range(len(configs))), tuple(range(len(configs))))
    return shorten(_kinds(configs))


def _kinds(configs: Sequence[Any]) -> list[int]:
    """A number for each config; equal ones have the same."""
    distinct: list[Any] = []
    kinds = []
    for config in configs:
        found = next((index for index, other in enumerate(distinct) if other == config), None)
        if found is None:
            found = len(distinct)
            distinct.append(config)
        kinds.append(found)
    return kinds


def _whole(sizes: LocalSizes, shortening: Shortening | None) -> int:
    """Elements with all layers, those that were left out too."""
    places = shortening.likeness if shortening is not None else ()
    return sizes.rest + sum(sizes.layers[place] for place in places)


# ---- memory ---------------------------------------------------------------------------------------------------


def _memory(trace: Trace, shortening: Shortening | None, *, offload: bool) -> Memory:
    intervals = trace.intervals
    if shortening is not None:
        intervals = shortening.extend(intervals, trace.layer_states, foreach=trace.foreach)
    counted = [use for use in Use if not (offload and use in STATES)]
    # Where the states live on the host, so do clipping and the update.
    on_device = [i for i in intervals if not (offload and i.phase in ("clipping", "update"))]
    highest = max(on_device, key=lambda interval: interval.peak.of(counted))
    states = _states(intervals)
    peak = Held(*(value if use in counted else 0 for use, value in zip(Use, highest.peak.parts(), strict=True)))
    return Memory(peak, _place(highest), states, states.total if offload else 0)


def _states(intervals: Sequence[Interval]) -> Held:
    first = intervals[0].start
    gradients = max(moment.gradients for i in intervals for moment in (i.start, i.peak, i.end))
    return Held(parameters=first.parameters, gradients=gradients, optimizer=first.optimizer)


def _place(interval: Interval) -> str:
    if interval.layer is not None:
        return f"{interval.phase} of layer {interval.layer}"
    return {"loss": "the loss", "update": "the update"}.get(interval.phase, interval.phase)
