"""What one rank of a run will hold, before there is a run: on one machine, without memory or communication.

In: a model's spec, the trainer's config, a world size. Out: a `RankPlan` with the sizes of the model and the bytes of
parameters, gradients and optimizer states on one rank. Activations are not counted.
"""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hp_protocols.platform import Capability, get_platform

from .parallel_dims import ParallelDims

if TYPE_CHECKING:
    from hp_protocols.model_spec import ModelSpec
    from hp_protocols.platform import Module
    from hp_protocols.trainer_sections import TrainerConfig

__all__ = ["RankPlan", "StateBytes", "plan_rank", "state_bytes"]


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Bytes on one rank that stay from step to step (gradients: from backward to the update)."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer


@dataclass(frozen=True, slots=True)
class RankPlan:
    """The whole model, and one rank's part of it.

    Attributes:
        parameters: of the whole model.
        flops_per_token: forward and backward, of the whole model.
        parallel_dims: the degrees, with dp_shard = -1 resolved.
        rank_parameters: elements that the rank holds.
        rank_bytes: what they, their gradients and optimizer states take.
    """

    parameters: int
    flops_per_token: int
    parallel_dims: ParallelDims
    rank_parameters: int
    rank_bytes: StateBytes


def plan_rank(
    spec: ModelSpec, *, trainer_config: TrainerConfig, world_size: int, rank: int = 0, optimizer_states: int = 2
) -> RankPlan:
    """Lay a model out on a world that is only pretended, and weigh one rank's part.

    Args:
        spec: a model of our protocol (with `model` and `parallelize_fn`); it is not changed.
        trainer_config: sections as a trainer has them; degrees, dtypes and recomputation are read from it.
        rank: where shards are uneven, the first ranks hold most.
        optimizer_states: tensors of a parameter's shape and dtype that the optimizer keeps (Adam: 2).

    Raises:
        ConfigError: degrees that do not fit the world or the model.
        ValueError: the spec has no model config or no parallelize function.
        RuntimeError: this process is part of a world already.
        CapabilityError: the platform cannot pretend a world.
    """
    platform = get_platform()
    platform.require(Capability.COLLECTIVES, "plan_rank")
    if spec.model is None or spec.parallelize_fn is None:
        raise ValueError(f"{spec.name} has no model config or no parallelize_fn, so its layout is not known")
    parallelism: Any = trainer_config.parallelism
    dims = ParallelDims.from_config(parallelism, world_size)
    config = copy.deepcopy(spec.model)
    config.update_from_config(trainer_config=trainer_config)
    training = trainer_config.training
    model: Any = config.build_on_meta(training.dtype)
    parameters, flops = config.get_nparams_and_flops(model, training.seq_len)
    with platform.pretended_world(world_size, rank):
        model = spec.parallelize_fn(model, parallel_dims=dims, trainer_config=trainer_config)
        local = sum(_local(parameter).numel() for parameter in model.parameters())
        held = state_bytes(model, optimizer_states=optimizer_states)
    # Without the meshes of a world that is gone.
    return RankPlan(parameters, flops, dataclasses.replace(dims), local, held)


def state_bytes(model: Module, *, optimizer_states: int = 2) -> StateBytes:
    """Bytes of this rank's parts of the model's parameters, of their gradients, and of their optimizer states.

    A tied parameter counts once; a frozen one has neither gradient nor states.
    """
    parameters = trained = 0
    for parameter in model.parameters():
        local = _local(parameter)
        size = local.numel() * local.element_size()
        parameters += size
        trained += size if parameter.requires_grad else 0
    return StateBytes(parameters, trained, optimizer_states * trained)


def _local(parameter: Any) -> Any:
    return parameter.to_local() if isinstance(parameter, get_platform().DTensor) else parameter
