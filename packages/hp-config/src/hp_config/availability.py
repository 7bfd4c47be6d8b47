"""Which knobs of the shared sections act today, and what to use in place of those that do not.

In: a section (a dataclass) and its path in the tree. Out: one `Fault` per field that was moved off its
default although nothing would act on it yet; and, for torchtitan's names that do not exist here, one sentence.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from hp_protocols.errors import Fault

__all__ = ["NOT_YET", "TORCHTITAN_ONLY", "not_yet_faults"]

# Section class name → field → why only the default is accepted, and what to do meanwhile.
# A feature that arrives deletes its line here; nothing else in this package changes.
NOT_YET: Mapping[str, Mapping[str, str]] = {
    "ParallelismConfig": {
        "tensor_parallel_degree": "tensor parallelism is not on the command line yet; shard with "
        "parallelism.data_parallel_shard_degree instead",
        "enable_sequence_parallel": "sequence parallelism comes with tensor parallelism, which is not available yet",
        "disable_loss_parallel": "loss parallelism comes with tensor parallelism, which is not available yet",
        "context_parallel_degree": "context parallelism is not on the command line yet; a shorter training.seq_len "
        "or activation_checkpoint.mode=full saves memory meanwhile",
        "pipeline_parallel_degree": "pipeline parallelism is not available yet; shard with "
        "parallelism.data_parallel_shard_degree instead",
        "expert_parallel_degree": "expert parallelism comes with the mixture-of-experts models, which are not "
        "available yet",
    },
}

# Section class name → field → value → why this one value of a working field is refused.
NOT_YET_VALUES: Mapping[str, Mapping[str, Mapping[str, str]]] = {
    "ActivationCheckpointConfig": {
        "mode": {
            "memory_budget": "a memory budget needs the partitioner of compiled blocks, which is not wired up yet; "
            "use selective or full",
        },
    },
    "CompileConfig": {
        "mode": {
            "graph": "Graph Mode (hp-compile) is not wired into the trainer yet; use blocks or none",
        },
    },
}

# torchtitan's names that its users may try here, and what stands in their place.
TORCHTITAN_ONLY: Mapping[str, Mapping[str, str]] = {
    "TrainingConfig": {
        "gc_debug": "not offered; training.gc_freq sets how often garbage is collected",
    },
    "ParallelismConfig": {
        "enable_fsdp_symm_mem": "not offered: it is for NVIDIA GPUs only",
        "enable_async_tensor_parallel": "not offered",
        "full_dtensor": "not offered",
        "module_fqns_per_model_part": "comes with pipeline parallelism, which is not available yet",
        "pipeline_parallel_first_stage_less_layers": "comes with pipeline parallelism, which is not available yet",
        "pipeline_parallel_last_stage_less_layers": "comes with pipeline parallelism, which is not available yet",
        "pipeline_parallel_layers_per_stage": "comes with pipeline parallelism, which is not available yet",
        "pipeline_parallel_schedule": "comes with pipeline parallelism, which is not available yet",
        "pipeline_parallel_schedule_csv": "comes with pipeline parallelism, which is not available yet",
        "pipeline_parallel_microbatch_size": "comes with pipeline parallelism, which is not available yet",
        "context_parallel_load_balancer": "comes with context parallelism, which is not available yet",
        "context_parallel_rotate_method": "comes with context parallelism, which is not available yet",
    },
    "ActivationCheckpointConfig": {
        "memory_budget": "comes with activation_checkpoint.mode=memory_budget, which is not available yet",
        "visualize_memory_budget_pareto": "comes with activation_checkpoint.mode=memory_budget, which is not "
        "available yet",
        "per_op_sac_force_recompute_mm_shapes_by_fqns": "not offered; activation_checkpoint.mode takes "
        "none, selective or full",
    },
    "CompileConfig": {
        "enable": "use compile.mode: none or blocks",
        "components": "use compile.mode: none or blocks",
    },
    "CommConfig": {
        "trace_buf_size": "not offered; a late rank is named by the timeouts comm.*_timeout_seconds",
        "save_traces_folder": "not offered; a late rank is named by the timeouts comm.*_timeout_seconds",
        "save_traces_file_prefix": "not offered; a late rank is named by the timeouts comm.*_timeout_seconds",
        "mode": "not offered; the backend follows from the device",
    },
    "DebugConfig": {
        "moe_force_load_balance": "comes with the mixture-of-experts models, which are not available yet",
        "batch_invariant": "not offered",
        "save_config_file": "not needed: every run writes resolved.yaml into its folder",
        "enable_structured_logging": "not offered; every run writes metrics.jsonl into its folder",
    },
}


def not_yet_faults(section: Any, path: str) -> list[Fault]:
    """One `Fault` for each field of `section` that asks for something that is not available yet."""
    name = type(section).__name__
    fields = {f.name: f for f in dataclasses.fields(section)}
    faults: list[Fault] = []
    for field_name, reason in NOT_YET.get(name, {}).items():
        value, default = getattr(section, field_name), fields[field_name].default
        if value != default:
            faults.append(
                Fault(f"{path}.{field_name}", f"{value!r} is not available yet: {reason}", allowed=str(default))
            )
    for field_name, refused in NOT_YET_VALUES.get(name, {}).items():
        value = getattr(section, field_name)
        if value in refused:
            faults.append(Fault(f"{path}.{field_name}", f"{value!r} is not available yet: {refused[value]}"))
    return faults
