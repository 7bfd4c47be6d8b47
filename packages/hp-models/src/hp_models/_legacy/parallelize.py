"""Lays a bare model out on the processes of a run, by its plans.

In: a bare model with `layers`, `embed_tokens`, `norm` and `lm_head`, the meshes, the run's sections. Out: the same
model: context parallel, tensor parallel, recomputation, data parallel, in this order. State-dict names stay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hp_models._legacy.context_parallel import MIXING, apply_context_parallel
from hp_models._legacy.plans import read_cp_modules, read_tp_plan
from hp_models._legacy.tensor_parallel import apply_tensor_parallel, sharing_faults
from hp_protocols.distributed import ParallelDims, apply_ac, apply_data_parallel
from hp_protocols.errors import ConfigError, Fault
from hp_protocols.platform import get_platform

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hp_models._legacy.qwen3_5 import Qwen3_5
    from hp_protocols.platform import Module
    from hp_protocols.trainer_sections import TrainerConfig

__all__ = ["parallelize_bare_model"]


def parallelize_bare_model(model: Qwen3_5, *, parallel_dims: ParallelDims, trainer_config: TrainerConfig) -> Qwen3_5:
    """Apply what the run asks for.

    Raises:
        ConfigError: a kind of parallelism that this model does not have (yet).
    """
    plan, mixing = read_tp_plan(model), read_cp_modules(model, MIXING)
    _refuse(parallel_dims, sharing_faults(model, plan, parallel_dims.tp))
    if parallel_dims.cp_enabled:
        apply_context_parallel(model, mixing, parallel_dims.get_mesh("cp"))
    if parallel_dims.tp_enabled:
        apply_tensor_parallel(model, plan, parallel_dims.get_mesh("tp"))
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
    )
    training, dtypes = trainer_config.training, get_platform().dtype_map
    reshard: Any = trainer_config.parallelism.fsdp_reshard_after_forward
    apply_data_parallel(
        model,
        parallel_dims=parallel_dims,
        units=_units(model, blocks),
        param_dtype=dtypes[training.mixed_precision_param],
        reduce_dtype=dtypes[training.mixed_precision_reduce],
        reshard_after_forward=reshard,
    )
    return model


def _units(model: Qwen3_5, blocks: Sequence[Module]) -> list[Module | list[Module]]:
    """What is gathered together, in the order of forward; a tied matrix keeps both ends of the model in one unit."""
    if model.config.tie_word_embeddings:
        return [[model.embed_tokens, model.norm, model.lm_head], *blocks]
    return [model.embed_tokens, *blocks, [model.norm, model.lm_head]]


def _refuse(parallel_dims: ParallelDims, faults: list[Fault]) -> None:
    asked = {"pp": parallel_dims.pp_enabled, "ep": parallel_dims.ep_enabled}
    faults = faults + [
        Fault(
            f"train.accelerator.{name}",
            f"{getattr(parallel_dims, name)}: the bare model of the older trainer cannot be split so",
            allowed="1",
            hint="dp_shard, dp_replicate, tp and cp work",
        )
        for name, enabled in asked.items()
        if enabled
    ]
    if faults:
        raise ConfigError(faults)
