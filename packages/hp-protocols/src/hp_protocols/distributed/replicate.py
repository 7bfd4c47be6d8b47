"""Replicated data parallelism (DDP) of a model, with FSDP2's machinery.

In: a model, its units in the order of forward, a mesh with the axis `dp_replicate`. Out: the model with whole
parameters on every rank; gradients are summed over the ranks, one all-reduce per unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hp_protocols.platform import Capability, get_platform

from .units import plan_units

if TYPE_CHECKING:
    from hp_protocols.platform import DeviceMesh, Module, ops

__all__ = ["apply_replicate"]


def apply_replicate(
    model: Module,
    *,
    mesh: DeviceMesh,
    units: Sequence[Module | Sequence[Module]],
    param_dtype: ops.dtype | None = None,
    reduce_dtype: ops.dtype | None = None,
    cast_forward_inputs: bool = False,
    sum_gradients: bool = True,
) -> Module:
    """Replicate each unit, then what is left of the model; in place. Arguments mean what they mean in `apply_fsdp`.

    Every rank has to start from the same parameters; nothing is broadcast (`Module.init_states` draws the same values
    on every rank).

    Args:
        mesh: one axis to replicate over.

    Returns:
        `model`.

    Raises:
        ValueError: see `plan_units`; or the mesh has more than one axis.
        CapabilityError: the platform has no FSDP.
    """
    platform = get_platform()
    platform.require(Capability.FSDP, "apply_replicate")
    if mesh.ndim != 1:
        raise ValueError(f"replication runs over 1 axis; this mesh has {mesh.ndim}: {mesh.mesh_dim_names}")
    for modules in [*(plan.modules for plan in plan_units(model, units)), (model,)]:
        platform.replicate_unit(
            modules,
            mesh=mesh,
            param_dtype=param_dtype,
            reduce_dtype=reduce_dtype,
            cast_forward_inputs=cast_forward_inputs,
            sum_gradients=sum_gradients,
        )
    return model
