"""Graph Mode: a whole training step as one FX graph, partitioned and scheduled by passes.

In: the names of this package. Out: the objects behind them, each imported when it is first asked for,
so that the configuration (`PassConfig`, `PassPlan`) imports and validates where torch is missing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hp_compile.pass_config import (
        DP_MODES,
        PP_SCHEDULES,
        PassConfig,
        build_pass_config_from_trainer_config,
        normalize_dp_mode,
    )
    from hp_compile.pass_plan import FSDPModuleConfig, PassPlan, create_sharding_plan_from_yaml
    from hp_compile.passes.base import GraphPass
    from hp_compile.passes.cleanup import CanonicalizeGraphPass, DeadCodeEliminationPass
    from hp_compile.passes.insert import insert_call
    from hp_compile.passes.overlap.schedule import AutoOverlapPass
    from hp_compile.passes.parallel.fsdp_pass import FSDPPass
    from hp_compile.passes.pipeline import PassPipeline
    from hp_compile.tracer.capture import run_traced_graph, trace_model_graph
    from hp_compile.tracer.joint_graph import JointGraph
    from hp_compile.trainer import GraphTrainer
    from hp_compile.training.shard_guard import distributed_view

__all__ = [
    "DP_MODES",
    "PP_SCHEDULES",
    "AutoOverlapPass",
    "CanonicalizeGraphPass",
    "DeadCodeEliminationPass",
    "FSDPModuleConfig",
    "FSDPPass",
    "GraphPass",
    "GraphTrainer",
    "JointGraph",
    "PassConfig",
    "PassPipeline",
    "PassPlan",
    "build_pass_config_from_trainer_config",
    "create_sharding_plan_from_yaml",
    "distributed_view",
    "insert_call",
    "normalize_dp_mode",
    "run_traced_graph",
    "trace_model_graph",
]

_HOME = {
    "DP_MODES": "pass_config",
    "PP_SCHEDULES": "pass_config",
    "PassConfig": "pass_config",
    "build_pass_config_from_trainer_config": "pass_config",
    "normalize_dp_mode": "pass_config",
    "FSDPModuleConfig": "pass_plan",
    "PassPlan": "pass_plan",
    "create_sharding_plan_from_yaml": "pass_plan",
    "GraphPass": "passes.base",
    "PassPipeline": "passes.pipeline",
    "AutoOverlapPass": "passes.overlap.schedule",
    "CanonicalizeGraphPass": "passes.cleanup",
    "DeadCodeEliminationPass": "passes.cleanup",
    "FSDPPass": "passes.parallel.fsdp_pass",
    "GraphTrainer": "trainer",
    "JointGraph": "tracer.joint_graph",
    "distributed_view": "training.shard_guard",
    "insert_call": "passes.insert",
    "run_traced_graph": "tracer.capture",
    "trace_model_graph": "tracer.capture",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("hp-compile")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__, "__version__"])
