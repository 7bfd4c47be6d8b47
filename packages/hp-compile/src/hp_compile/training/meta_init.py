"""Models that come on the meta device: sharded first, then filled module by module.

In: a partitioned model with meta tensors. Out: real local shards, drawn by each module's `reset_parameters`.
"""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist
from torch import nn

from hp_compile import _torch_compat as compat
from hp_compile.mesh import DataParallelMesh
from hp_compile.tracer.state import StateSlot, scan_state, set_shard_info, shard_info
from hp_compile.training.shard_guard import own_part


@torch.no_grad()
def materialize(model: nn.Module, device: torch.device, seed: int) -> None:
    """Only one module is whole at a time. The draw depends on the seed (common to all ranks) and its name alone."""
    slots = {id(slot.tensor): slot for slot in scan_state(model)}
    for name, module in model.named_modules():
        own = [tensor for part in compat.tensor_slots(module) for tensor in part.values()]
        waiting = [slots[id(tensor)] for tensor in own if tensor is not None and tensor.is_meta]
        if not waiting:
            continue
        filled = [_real(slot, device) for slot in waiting]
        if callable(getattr(module, "reset_parameters", None)):
            digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
            with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device], device_type=_rng(device)):
                torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
                module.reset_parameters()
        for tensor in filled:
            info = shard_info(tensor)
            if info is not None:
                tensor.data = own_part(tensor.data, info).clone()


def _real(slot: StateSlot, device: torch.device) -> torch.Tensor:
    """A whole tensor in place of a meta one, under every name of it; torch cannot move a tensor off meta in place."""
    info = shard_info(slot.tensor)
    shape = slot.tensor.shape if info is None else info.global_shape
    real = torch.empty(shape, dtype=slot.tensor.dtype, device=device)
    if slot.is_param:
        real = nn.Parameter(real, requires_grad=slot.tensor.requires_grad)
    if info is not None:
        set_shard_info(real, info)
    for module, attribute in slot.owners:
        compat.tensor_slots(module)[0 if slot.is_param else 1][attribute] = real
    return real


def unready(model: nn.Module, on_meta: list[str]) -> set[str]:
    """Names of what no `reset_parameters` has filled."""
    return {
        slot.fqn
        for slot in scan_state(model)
        if slot.fqn in on_meta and not any(hasattr(module, "reset_parameters") for module, _ in slot.owners)
    }


def _rng(device: torch.device) -> str:
    return "cuda" if device.type == "cpu" else device.type


def common_seed(mesh: DataParallelMesh | None, device: torch.device) -> int:
    """The first rank's seed."""
    seed = torch.tensor(torch.initial_seed() & (2**62 - 1), dtype=torch.int64, device=device)
    if mesh is not None:
        for axis in mesh.axes:
            dist.broadcast(seed, group=axis.group, group_src=0)
    return int(seed)
