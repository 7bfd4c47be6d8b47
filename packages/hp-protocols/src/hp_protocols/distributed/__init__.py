"""Parallelism of a model, in plain keyword values: meshes, data parallelism, recomputation, compilation, clipping.

In: a model, a mesh, the modules that communicate or recompute together. Out: the same model, changed in place.
Importing this package imports no backend.
"""

from __future__ import annotations

from .activation_checkpoint import apply_ac
from .clip_grad import clip_grad_norm_, lay_out_gradients
from .compile import apply_compile
from .context_parallel import apply_cp
from .data_parallel import apply_data_parallel, data_parallel_mode
from .finish import finish_parallelize
from .fqn import canonical_fqn, canonical_named_parameters, canonical_state_dict
from .fsdp import apply_fsdp
from .parallel_dims import ParallelDims
from .rank_plan import RankPlan, StateBytes, plan_rank, state_bytes
from .replicate import apply_replicate
from .sequence_axis import SequenceAxis

__all__ = [
    "ParallelDims",
    "RankPlan",
    "SequenceAxis",
    "StateBytes",
    "apply_ac",
    "apply_compile",
    "apply_cp",
    "apply_data_parallel",
    "apply_fsdp",
    "apply_replicate",
    "canonical_fqn",
    "canonical_named_parameters",
    "canonical_state_dict",
    "clip_grad_norm_",
    "data_parallel_mode",
    "finish_parallelize",
    "lay_out_gradients",
    "plan_rank",
    "state_bytes",
]
