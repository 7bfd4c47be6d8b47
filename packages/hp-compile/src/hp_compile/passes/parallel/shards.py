"""Physical partition of a live model's parameters, in place (G10, G11, G18).

In: a model, its units and the mesh. Out: every parameter a plain local shard (or replica) that carries a `ShardInfo`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from hp_compile import _torch_compat as compat
from hp_compile.mesh import DataParallelMesh
from hp_compile.passes.parallel.units import Unit
from hp_compile.tracer.checks import refuse_shared_storage
from hp_compile.tracer.state import ShardInfo, StateSlot, scan_state, shard_info


def rows_of(rows: int, size: int, rank: int) -> tuple[int, int]:
    """First row and number of rows of one rank: chunks of ceil(rows / size), the last ones short or empty."""
    chunk = -(-rows // size)
    start = min(rank * chunk, rows)
    return start, min(chunk, rows - start)


def partition_model(
    model: nn.Module, units: list[Unit], mesh: DataParallelMesh, tp_placements: dict[str, Any] | None = None
) -> None:
    """Shard each planned parameter on dim 0; replicas and scalars only get their description. Idempotent."""
    slots = {slot.fqn: slot for slot in scan_state(model) if slot.is_param}
    fresh = [slot for slot in slots.values() if shard_info(slot.tensor) is None]
    if not fresh:
        return
    if mesh.shard is not None:
        refuse_shared_storage(fresh)
    for unit in units:
        for fqn in unit.params:
            slot = slots[fqn]
            if shard_info(slot.tensor) is None:
                sharded = unit.planned and mesh.shard is not None and slot.tensor.dim() > 0
                _partition(slot, unit, mesh, sharded, (tp_placements or {}).get(fqn))


def _partition(slot: StateSlot, unit: Unit, mesh: DataParallelMesh, sharded: bool, declared: Any) -> None:
    live = slot.tensor
    is_dtensor = isinstance(live, DTensor)
    local = live.detach().to_local() if is_dtensor else live.detach()
    if sharded and not local.is_contiguous():
        raise ValueError(
            f"parameter {slot.fqn!r} of shape {tuple(local.shape)} has strides {tuple(local.stride())} and cannot be "
            "sharded on dim 0; store it contiguously (parameter.data = parameter.data.contiguous())"
        )
    info = _describe(slot, unit, mesh, sharded, local, declared)
    if sharded:
        assert mesh.shard is not None
        start, count = rows_of(local.shape[0], mesh.shard.size, mesh.shard.rank)
        # A copy: a view would keep the whole parameter alive.
        local = local.narrow(0, start, count).clone()
    if is_dtensor:
        parameter = nn.Parameter(local, requires_grad=live.requires_grad)
        for module, attribute in slot.owners:
            compat.tensor_slots(module)[0][attribute] = parameter
    else:
        parameter = live
        parameter.data = local
        parameter.grad = None
    parameter.shard_info = info


def _describe(
    slot: StateSlot, unit: Unit, mesh: DataParallelMesh, sharded: bool, local: torch.Tensor, declared: Any
) -> ShardInfo:
    live = slot.tensor
    placements = mesh.placements(sharded)
    if not isinstance(live, DTensor):
        return ShardInfo(
            fqn=slot.fqn,
            unit=unit.fqn,
            mesh=mesh.device_mesh,
            placements=placements,
            global_shape=live.shape,
            global_stride=live.stride(),
            full_shape=local.shape,
            sharded=sharded,
            shard_dim_of_mesh=mesh.device_mesh.ndim - 1,
        )
    if sharded:
        cuts = compat.shards_of(compat.dtensor_spec(live), 0)
        last = compat.strided_shard(0, cuts) if cuts > 1 else Shard(0)
        placements = (*placements[:-1], last)
    return ShardInfo(
        fqn=slot.fqn,
        unit=unit.fqn,
        mesh=compat.concatenate_meshes([mesh.device_mesh, live.device_mesh]),
        placements=(*placements, *live.placements),
        global_shape=live.shape,
        global_stride=live.stride(),
        full_shape=local.shape,
        sharded=sharded,
        shard_dim_of_mesh=mesh.device_mesh.ndim - 1,
        tp_mesh=live.device_mesh,
        tp_placements=tuple(live.placements),
    )


def as_dtensor(local: torch.Tensor, info: ShardInfo) -> DTensor:
    """A local shard (or its gradient) as the DTensor that it is part of."""
    return DTensor.from_local(
        local, info.mesh, info.placements, run_check=False, shape=info.global_shape, stride=info.global_stride
    )


def is_replica(info: ShardInfo) -> bool:
    return all(isinstance(placement, Replicate) for placement in info.placements)
