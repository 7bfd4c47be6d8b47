"""Lay a dense Qwen3.5 out on the processes of a run.

In: a built model (usually on the meta device), the run's meshes and its sections. Out: the same model, wrapped in
this order: context parallel, tensor parallel, recomputation, compilation, data parallel. State-dict names stay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hp_models.common.context_parallel import ACROSS_STRETCHES
from hp_protocols.distributed import ParallelDims, apply_ac, apply_compile, apply_cp, apply_data_parallel
from hp_protocols.errors import ConfigError, Fault
from hp_protocols.platform import get_platform

if TYPE_CHECKING:
    from hp_models.qwen3_5_v2.model import Qwen3_5Model
    from hp_protocols.trainer_sections import TrainerConfig

__all__ = ["parallelize_qwen3_5_v2"]


def parallelize_qwen3_5_v2(
    model: Qwen3_5Model, *, parallel_dims: ParallelDims, trainer_config: TrainerConfig
) -> Qwen3_5Model:
    """Apply what the run asks for; `Config.update_from_config` has filled the sharding declarations before.

    Under `compile.mode = graph` data parallelism is left to the graph.

    Raises:
        ConfigError: a kind of parallelism that this model does not have (yet).
    """
    _refuse_unavailable(parallel_dims, trainer_config)
    compiled = trainer_config.compile.mode == "blocks"
    if parallel_dims.cp_enabled:
        apply_cp(model, mesh=parallel_dims.get_mesh("cp"), across=ACROSS_STRETCHES)
    if parallel_dims.tp_enabled:
        model.parallelize(parallel_dims.get_mesh("tp"))
    # Any: a section holds names as plain strings, which the functions below check.
    recompute: Any = trainer_config.activation_checkpoint
    blocks = apply_ac(
        model,
        blocks=model.layers,
        mode=recompute.mode,
        preserve_rng_state=recompute.preserve_rng_state,
        determinism_check=recompute.determinism_check,
        early_stop=recompute.early_stop,
        debug=recompute.debug,
        compile_enabled=compiled,
    )
    if compiled:
        apply_compile(blocks=blocks, backend=trainer_config.compile.backend)
    if trainer_config.compile.mode != "graph":
        _apply_data_parallel(model, parallel_dims, trainer_config)
    return model


def _apply_data_parallel(model: Qwen3_5Model, parallel_dims: ParallelDims, trainer_config: TrainerConfig) -> None:
    """Hand the sections' words on."""
    training, dtypes = trainer_config.training, get_platform().dtype_map
    reshard: Any = trainer_config.parallelism.fsdp_reshard_after_forward
    apply_data_parallel(
        model,
        parallel_dims=parallel_dims,
        units=model.segments(),
        param_dtype=dtypes[training.mixed_precision_param],
        reduce_dtype=dtypes[training.mixed_precision_reduce],
        reshard_after_forward=reshard,
        cpu_offload=training.enable_cpu_offload,
    )


def _refuse_unavailable(parallel_dims: ParallelDims, trainer_config: TrainerConfig) -> None:
    faults = []
    if parallel_dims.pp_enabled:
        faults.append(
            Fault(
                "parallelism.pipeline_parallel_degree",
                f"{parallel_dims.pp} stages: pipeline parallelism of Qwen3_5Model is not available yet",
                allowed="1",
                hint="use data_parallel_shard_degree instead",
            )
        )
    if parallel_dims.ep_enabled:
        faults.append(
            Fault(
                "parallelism.expert_parallel_degree",
                f"{parallel_dims.ep}: this is the dense Qwen3.5, it has no experts",
                allowed="1",
            )
        )
    if trainer_config.training.enable_cpu_offload and parallel_dims.dp_replicate_enabled and parallel_dims.fsdp == 1:
        faults.append(
            Fault(
                "training.enable_cpu_offload",
                "offloading works on shards, and this run only replicates",
                allowed="False",
                hint="set parallelism.data_parallel_shard_degree above 1",
            )
        )
    if faults:
        raise ConfigError(faults)
