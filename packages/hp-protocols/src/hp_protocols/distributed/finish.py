"""What every model's parallelize function ends with: recomputation, compilation, data parallelism, in this order.

In: a model that has done its own context and tensor parallelism, its blocks, the run's meshes and sections. Out: the
same model, in place. A model without parallelism of its own has nothing else to do.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from hp_protocols.errors import ConfigError, Fault
from hp_protocols.platform import get_platform

from .activation_checkpoint import apply_ac
from .compile import apply_compile
from .data_parallel import apply_data_parallel, data_parallel_mode
from .parallel_dims import ParallelDims

if TYPE_CHECKING:
    from hp_protocols.model import BaseModel
    from hp_protocols.platform import Module
    from hp_protocols.trainer_sections import TrainerConfig

__all__ = ["finish_parallelize"]


def finish_parallelize(
    model: BaseModel, *, blocks: Iterable[Module], parallel_dims: ParallelDims, trainer_config: TrainerConfig
) -> BaseModel:
    """Apply `activation_checkpoint`, `compile`, and the data parallelism of the layout, as the sections say.

    Under `compile.mode = graph` data parallelism is left to the graph.

    Args:
        blocks: modules of `model` that are recomputed and compiled each by itself, usually its layers. What is
            gathered together is said by `model.segments()`.

    Returns:
        `model`.

    Raises:
        ConfigError: offloading where the layout only replicates, or a compiler that is not there.
    """
    # Any: a section holds names as plain strings, which the functions below check.
    recompute: Any = trainer_config.activation_checkpoint
    training, mode = trainer_config.training, trainer_config.compile.mode
    if training.enable_cpu_offload and data_parallel_mode(parallel_dims) == "ddp":
        problem = "offloading works on shards, and this run only replicates"
        hint = "set parallelism.data_parallel_shard_degree above 1"
        raise ConfigError(Fault("training.enable_cpu_offload", problem, allowed="False", hint=hint))
    blocks = apply_ac(
        model,
        blocks=blocks,
        mode=recompute.mode,
        preserve_rng_state=recompute.preserve_rng_state,
        determinism_check=recompute.determinism_check,
        early_stop=recompute.early_stop,
        debug=recompute.debug,
        compile_enabled=mode == "blocks",
    )
    if mode == "blocks":
        apply_compile(blocks=blocks, backend=trainer_config.compile.backend)
    if mode == "graph":
        return model
    dtypes = get_platform().dtype_map
    reshard: Any = trainer_config.parallelism.fsdp_reshard_after_forward
    apply_data_parallel(
        model,
        parallel_dims=parallel_dims,
        # Asked now, when recomputed blocks stand in their wrappers.
        units=model.segments(),
        param_dtype=dtypes[training.mixed_precision_param],
        reduce_dtype=dtypes[training.mixed_precision_reduce],
        reshard_after_forward=reshard,
        cpu_offload=training.enable_cpu_offload,
    )
    return model
