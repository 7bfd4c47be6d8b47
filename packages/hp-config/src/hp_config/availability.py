"""Which knobs of the shared sections act today, and what to use in place of those that do not.

In: a section (a dataclass) and its path in the tree. Out: one `Fault` per field that was moved off its
default although nothing would act on it yet; and, for torchtitan's names that do not exist here, one sentence.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hp_protocols.errors import Fault

__all__ = ["NOT_YET", "NOT_YET_VALUES", "TORCHTITAN_ONLY", "Missing", "not_yet_faults"]


@dataclass(frozen=True, slots=True)
class Missing:
    """A feature that does not exist yet, and what to use meanwhile."""

    feature: str
    instead: str | None = None


_SHARD = "parallelism.data_parallel_shard_degree shards the weights meanwhile"

# Section class name → field → the feature without which only the default is accepted.
# A feature that arrives deletes its line here; nothing else in this package changes.
NOT_YET: Mapping[str, Mapping[str, Missing]] = {
    "ParallelismConfig": {
        "pipeline_parallel_degree": Missing("pipeline parallelism", _SHARD),
        "expert_parallel_degree": Missing("a mixture-of-experts model", _SHARD),
    },
}

# Section class name → field → value → the feature without which this one value is refused.
NOT_YET_VALUES: Mapping[str, Mapping[str, Mapping[str, Missing]]] = {
    "ActivationCheckpointConfig": {
        "mode": {"memory_budget": Missing("the compiler's memory budget", "use selective or full")},
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
        "context_parallel_load_balancer": "not offered; each rank holds one contiguous stretch of the sequence",
        "context_parallel_rotate_method": "not offered; keys and values are gathered",
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
    faults = [
        _fault(f"{path}.{field}", getattr(section, field), missing, str(fields[field].default))
        for field, missing in NOT_YET.get(name, {}).items()
        if getattr(section, field) != fields[field].default
    ]
    for field, refused in NOT_YET_VALUES.get(name, {}).items():
        value = getattr(section, field)
        if value in refused:
            faults.append(_fault(f"{path}.{field}", value, refused[value], None))
    return faults


def _fault(where: str, value: Any, missing: Missing, allowed: str | None) -> Fault:
    problem = f"{value!r} needs {missing.feature}, which is not available yet"
    return Fault(where, problem, allowed, missing.instead)
