"""Physical partition of a live model's parameters, in place (G10, G11, G18).

In: a model, its units and the mesh. Out: every parameter a plain local shard (or replica) that carries a `ShardInfo`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from hp_compile import _torch_compat as compat
from hp_compile.mesh import DataParallelMesh, MeshAxis, axes_of
from hp_compile.passes.parallel.units import Unit
from hp_compile.tracer.checks import refuse_shared_storage
from hp_compile.tracer.state import (
    ShardInfo,
    StateSlot,
    contiguous_stride,
    local_tensor,
    scan_state,
    set_shard_info,
    shard_info,
)


@dataclass(frozen=True)
class PlainTensorParallel:
    """Tensor parallelism by plain local tensors: what a mesh context says of it.

    Attributes:
        mesh: the tensor-parallel mesh, 1-D.
        placements: by parameter FQN; names that are absent are replicas.
        known: False when nobody declared anything and no parameter is a DTensor.
    """

    mesh: Any
    placements: dict[str, Any]
    known: bool


def rows_of(rows: int, size: int, rank: int) -> tuple[int, int]:
    """First row and number of rows of one rank: chunks of ceil(rows / size), the last ones short or empty."""
    chunk = -(-rows // size)
    start = min(rank * chunk, rows)
    return start, min(chunk, rows - start)


def partition_model(
    model: nn.Module, units: list[Unit], mesh: DataParallelMesh, plain: PlainTensorParallel | None = None
) -> None:
    """Shard each planned parameter on dim 0; replicas and scalars only get their description. Idempotent.

    Raises:
        ValueError: a parameter cannot be cut; none has been cut then.
    """
    fresh = _to_partition(model, units, mesh)
    refuse_what_cannot_be_cut(model, units, mesh)
    for slot, unit, sharded in fresh:
        _partition(slot, unit, mesh, sharded, plain)


def _to_partition(model: nn.Module, units: list[Unit], mesh: DataParallelMesh) -> list[tuple[StateSlot, Unit, bool]]:
    """Parameters without a description yet, their unit, and whether they are sharded."""
    slots = {slot.fqn: slot for slot in scan_state(model) if slot.is_param}
    return [
        (slots[fqn], unit, unit.planned and mesh.shard is not None and slots[fqn].tensor.dim() > 0)
        for unit in units
        for fqn in unit.params
        if shard_info(slots[fqn].tensor) is None
    ]


def refuse_what_cannot_be_cut(model: nn.Module, units: list[Unit], mesh: DataParallelMesh) -> None:
    """Raises ValueError for two parameters in one storage, for one whose rows do not lie one after the other, and for
    gradients that are there already."""
    fresh = _to_partition(model, units, mesh)
    if held := [slot.fqn for slot, _, _ in fresh if slot.tensor.grad is not None]:
        raise ValueError(
            f"{', '.join(held[:5])}: {len(held)} parameters hold gradients of earlier backward passes, which cannot be "
            "sharded with them; apply them first, or drop them: model.zero_grad(set_to_none=True)"
        )
    if mesh.shard is not None:
        refuse_shared_storage([slot for slot, _, _ in fresh])
    for slot, _, sharded in fresh:
        local = local_tensor(slot.tensor)
        if sharded and not local.is_contiguous():
            raise ValueError(
                f"parameter {slot.fqn!r} of shape {tuple(local.shape)} has strides {tuple(local.stride())} and cannot "
                "be sharded on dim 0; store it contiguously (parameter.data = parameter.data.contiguous())"
            )


def _partition(slot: StateSlot, unit: Unit, mesh: DataParallelMesh, sharded: bool, plain: Any) -> None:
    live = slot.tensor
    local = local_tensor(live)
    info = _describe(slot, unit, mesh, sharded, local, plain)
    if sharded:
        assert mesh.shard is not None
        start, count = rows_of(local.shape[0], mesh.shard.size, mesh.shard.rank)
        # A copy: a view would keep the whole parameter alive.
        local = local.narrow(0, start, count).clone()
    if isinstance(live, DTensor):
        live = nn.Parameter(local, requires_grad=live.requires_grad)
        for module, attribute in slot.owners:
            compat.tensor_slots(module)[0][attribute] = live
    else:
        live.data = local
        live.grad = None
    set_shard_info(live, info)


def _describe(
    slot: StateSlot,
    unit: Unit,
    mesh: DataParallelMesh,
    sharded: bool,
    local: torch.Tensor,
    plain: PlainTensorParallel | None,
) -> ShardInfo:
    live = slot.tensor
    alone = ShardInfo(
        fqn=slot.fqn,
        unit=unit.fqn,
        mesh=mesh.device_mesh,
        placements=mesh.placements(sharded),
        global_shape=live.shape,
        global_stride=live.stride(),
        full_shape=local.shape,
        sharded=sharded,
        shard_dim_of_mesh=mesh.device_mesh.ndim - 1,
        placement_known=plain is None or plain.known or isinstance(live, DTensor),
    )
    if isinstance(live, DTensor):
        cuts = compat.shards_of(compat.dtensor_spec(live), 0)
        return _over_both(alone, live.device_mesh, tuple(live.placements), cuts)
    declared = plain.placements.get(slot.fqn) if plain is not None else None
    if plain is None or not isinstance(declared, Shard):
        return alone
    size = plain.mesh.size()
    shape = torch.Size(n * size if dim == declared.dim else n for dim, n in enumerate(live.shape))
    whole = replace(alone, global_shape=shape, global_stride=contiguous_stride(shape), plain=True)
    return _over_both(whole, plain.mesh, (declared,), size if declared.dim == 0 else 1)


def _over_both(info: ShardInfo, tp_mesh: Any, tp_placements: tuple[Any, ...], cuts: int) -> ShardInfo:
    """Add the tensor-parallel axis; where it has cut dim 0 before us, our shard is a strided one."""
    placements = info.placements
    if info.sharded and cuts > 1:
        placements = (*placements[:-1], compat.strided_shard(0, cuts))
    return replace(
        info,
        mesh=compat.concatenate_meshes([info.mesh, tp_mesh]),
        placements=(*placements, *tp_placements),
        tp_mesh=tp_mesh,
        tp_placements=tp_placements,
    )


def as_dtensor(local: torch.Tensor, info: ShardInfo) -> DTensor:
    """A local shard (or its gradient) as the DTensor that it is part of."""
    return DTensor.from_local(
        local, info.mesh, info.placements, run_check=False, shape=info.global_shape, stride=info.global_stride
    )


def _tp_mesh_of(context: Any) -> DeviceMesh | None:
    for name in ("device_mesh", "fsdp_non_moe_mesh"):
        candidate = getattr(context, name, None)
        if candidate is not None and "tp" in (candidate.mesh_dim_names or ()):
            return candidate["tp"] if candidate.ndim > 1 else candidate
    return None


def tensor_parallel_axes(model: nn.Module, context: Any, known: Iterable[MeshAxis] = ()) -> list[MeshAxis]:
    """Axes besides the data-parallel ones whose ranks run the same steps: the context's `tp`, and those of DTensors."""
    meshes = [_tp_mesh_of(context)]
    meshes += [parameter.device_mesh for parameter in model.parameters() if isinstance(parameter, DTensor)]
    found: dict[str, MeshAxis] = {}
    for mesh in dict.fromkeys(mesh for mesh in meshes if mesh is not None):
        found.update({axis.group_name: axis for axis in axes_of(mesh) if axis.size > 1})
    for axis in known:
        found.pop(axis.group_name, None)
    return list(found.values())


def plain_tensor_parallel(model: nn.Module, context: Any) -> PlainTensorParallel | None:
    """What the mesh context says of a `tp` axis; None without one, or if DTensors describe it themselves.

    Raises:
        ValueError: placements are declared without a mesh that has the dim `tp`.
    """
    declared = getattr(context, "tp_placements", None)
    mesh = _tp_mesh_of(context)
    if declared and mesh is None:
        raise ValueError("mesh_context.tp_placements is given, but neither of its meshes has the dim 'tp'")
    if mesh is None or mesh.size() == 1:
        return None
    if not declared and any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        return None
    return PlainTensorParallel(mesh, dict(declared or {}), declared is not None)
