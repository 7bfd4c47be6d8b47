"""Lay a dense Qwen3.5 out on the processes of a run.

In: a built model (usually on the meta device), the run's meshes and its sections. Out: the same model, wrapped in
this order: context parallel, tensor parallel, recomputation, compilation, data parallel. State-dict names stay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hp_models.common.context_parallel import ACROSS_STRETCHES
from hp_protocols.distributed import ParallelDims, apply_cp, finish_parallelize
from hp_protocols.errors import ConfigError, Fault

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
    _refuse_unavailable(parallel_dims)
    if parallel_dims.cp_enabled:
        apply_cp(model, mesh=parallel_dims.get_mesh("cp"), across=ACROSS_STRETCHES)
    if parallel_dims.tp_enabled:
        model.parallelize(parallel_dims.get_mesh("tp"))
    finish_parallelize(model, blocks=model.layers, parallel_dims=parallel_dims, trainer_config=trainer_config)
    return model


def _refuse_unavailable(parallel_dims: ParallelDims) -> None:
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
    if faults:
        raise ConfigError(faults)
