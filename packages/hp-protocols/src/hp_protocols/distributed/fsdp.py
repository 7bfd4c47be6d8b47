"""Fully sharded data parallelism (FSDP2) of a model.

In: a model, its units in the order of forward, a mesh with the axis `fsdp` (or `dp_replicate, fsdp` for HSDP).
Out: the model, its parameters sharded along dim 0; gradients are summed over the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal

from hp_protocols.errors import ConfigError, Fault
from hp_protocols.platform import Capability, get_platform

from .units import UnitPlan, plan_units

if TYPE_CHECKING:
    from hp_protocols.platform import DeviceMesh, Module, ops

__all__ = ["ReshardAfterForward", "apply_fsdp"]

ReshardAfterForward = bool | Literal["default", "always", "never"]


def apply_fsdp(
    model: Module,
    *,
    mesh: DeviceMesh,
    units: Sequence[Module | Sequence[Module]],
    param_dtype: ops.dtype | None = None,
    reduce_dtype: ops.dtype | None = None,
    reshard_after_forward: ReshardAfterForward = "default",
    pp_enabled: bool = False,
    cpu_offload: bool = False,
    cast_forward_inputs: bool = False,
    sum_gradients: bool = True,
) -> Module:
    """Shard each unit, then what is left of the model, with FSDP2; in place.

    Args:
        mesh: one axis to shard over, or two: replicate over the first, shard over the second.
        units: modules (or lists of modules, each list one unit) in the order in which forward is done with them, none
            of them `model`. Modules that share a parameter belong in one unit.
        param_dtype: dtype of parameters and gradients in forward and backward; None keeps the parameters' own.
        reduce_dtype: dtype in which gradients are reduced; None: as `param_dtype`.
        reshard_after_forward: `"always"` or True frees a unit's whole parameters after its forward and gathers them
            again in backward, `"never"` or False keeps them; `"default"` is always, except for the last unit, which
            backward needs first, and except for all units under pipeline parallelism, where each micro-batch would
            gather again. The model's own unit is never resharded.
        pp_enabled: whether pipeline parallelism is on (for `"default"`).
        cpu_offload: keep sharded parameters, gradients and optimizer states in host memory.
        cast_forward_inputs: cast each unit's floating-point inputs to `param_dtype`. Off: a model hands its positions'
            cos and sin, or its router's scores, from block to block in their own precision.
        sum_gradients: sum over ranks; False: mean. With sums the loss of each rank is divided by the tokens of all.

    Returns:
        `model`.

    Raises:
        ValueError: see `plan_units`; or the mesh has more than two axes or no names; or a value that is not allowed.
        ConfigError: `cpu_offload` where the device is the cpu.
        CapabilityError: the platform has no FSDP.
    """
    platform = get_platform()
    platform.require(Capability.FSDP, "apply_fsdp")
    policy = _policy(reshard_after_forward, pp_enabled)
    if mesh.ndim > 2:
        raise ValueError(f"FSDP runs over 1 axis, or 2 for HSDP; this mesh has {mesh.ndim}: {mesh.mesh_dim_names}")
    if cpu_offload and mesh.device_type == "cpu":
        raise ConfigError(
            Fault("training.enable_cpu_offload", "the device is the cpu, whose memory is the host's", allowed="False")
        )
    shard = partial(
        platform.shard_unit,
        mesh=mesh,
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
        cast_forward_inputs=cast_forward_inputs,
        cpu_offload=cpu_offload,
        sum_gradients=sum_gradients,
    )
    for plan in plan_units(model, units):
        shard(plan.modules, reshard_after_forward=_reshards(plan, policy))
    # None lets FSDP2 decide for the outermost unit: backward begins there, so it is kept.
    shard((model,), reshard_after_forward=None)
    return model


def _policy(given: ReshardAfterForward, pp_enabled: bool) -> Literal["default", "always", "never"]:
    if isinstance(given, bool):
        return "always" if given else "never"
    if given not in ("default", "always", "never"):
        raise ValueError(f"reshard_after_forward={given!r}; allowed: True, False, 'default', 'always', 'never'")
    return "never" if given == "default" and pp_enabled else given


def _reshards(plan: UnitPlan, policy: Literal["default", "always", "never"]) -> bool:
    return not plan.is_last if policy == "default" else policy == "always"
