"""Which kind of data parallelism a layout means, and its application to a model.

In: `ParallelDims`, a model and its units. Out: the model, sharded (FSDP, HSDP), replicated (DDP), or as it was where
one process computes in the parameters' own dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from .fsdp import ReshardAfterForward, apply_fsdp
from .parallel_dims import ParallelDims
from .replicate import apply_replicate

if TYPE_CHECKING:
    from hp_protocols.platform import Module, ops

__all__ = ["apply_data_parallel", "data_parallel_mode"]


def data_parallel_mode(parallel_dims: ParallelDims) -> Literal["fsdp", "hsdp", "ddp"]:
    """`fsdp` shards, `ddp` replicates, `hsdp` replicates shards. A single process shards over one rank."""
    if not parallel_dims.dp_replicate_enabled:
        return "fsdp"
    return "hsdp" if parallel_dims.fsdp_enabled else "ddp"


def apply_data_parallel(
    model: Module,
    *,
    parallel_dims: ParallelDims,
    units: Sequence[Module | Sequence[Module]],
    param_dtype: ops.dtype,
    reduce_dtype: ops.dtype,
    reshard_after_forward: ReshardAfterForward = "default",
    cpu_offload: bool = False,
) -> Module:
    """Shard or replicate as the layout says, and compute in `param_dtype`; in place. Gradients are summed.

    Nothing is done where there is nothing to do: one data-parallel rank, no context parallelism, all parameters in
    `param_dtype`, no offloading.

    Args:
        units: as for `apply_fsdp`, as are the other arguments; the last two have no meaning where a model is
            replicated.

    Returns:
        `model`.

    Raises:
        ValueError: as `apply_fsdp`; or `cpu_offload` where the layout only replicates.
    """
    casts = any(parameter.dtype != param_dtype for parameter in model.parameters())
    if not (parallel_dims.dp_cp_enabled or casts or cpu_offload):
        return model
    mode = data_parallel_mode(parallel_dims)
    if mode == "ddp":
        if cpu_offload:
            raise ValueError("cpu_offload works on shards, and this layout only replicates")
        mesh = parallel_dims.get_mesh("dp_replicate")
        return apply_replicate(model, mesh=mesh, units=units, param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    # The fsdp axis is there even with one rank: FSDP also casts to the dtypes of mixed precision.
    return apply_fsdp(
        model,
        mesh=parallel_dims.get_mesh(["dp_replicate", "fsdp"] if mode == "hsdp" else ["fsdp"]),
        units=units,
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
        reshard_after_forward=reshard_after_forward,
        cpu_offload=cpu_offload,
    )
