"""Models that come on the meta device: sharded first, then filled.

In: a partitioned model with meta tensors. Out: real local shards, drawn module by module by `reset_parameters`, or all
at once by the user's own function.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from hp_compile import _torch_compat as compat
from hp_compile.mesh import DataParallelMesh
from hp_compile.tracer.state import StateSlot, current_tensor, scan_state, set_shard_info, shard_info, swapped_state
from hp_compile.training.shard_guard import distributed_view, own_part

InitFn = Callable[[nn.Module], object]


@dataclass(frozen=True)
class Unready:
    """Tensors that nothing has filled, with the number of writes that each had seen by then."""

    writes: dict[str, tuple[torch.Tensor, int]]

    def names(self) -> list[str]:
        """Those that nothing has been written to since; a load writes in place."""
        return sorted(name for name, (tensor, count) in self.writes.items() if not _written(tensor, count))


def _written(tensor: torch.Tensor, count: int) -> bool:
    """Whether it was written to after it was made: `tensor.data` does not count writes, so look at the values, too."""
    return compat.writes_to(tensor) != count or not bool(_is_blank(tensor.detach()).all())


def _blank(tensor: torch.Tensor) -> torch.Tensor:
    """Not a number, where there is such a thing: what is used unfilled shows."""
    return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor.zero_()


def _is_blank(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.isnan() if tensor.is_floating_point() else tensor == 0


@torch.no_grad()
def materialize(model: nn.Module, device: torch.device, seed: int) -> Unready:
    """Only one module is whole at a time. The draw depends on the seed (common to all ranks) and its name alone."""
    slots = {id(slot.tensor): slot for slot in scan_state(model)}
    unready: dict[str, tuple[torch.Tensor, int]] = {}
    for name, module in model.named_modules():
        waiting = [slots[id(tensor)] for tensor in _own(module) if tensor.is_meta]
        if not waiting:
            continue
        made = {slot.fqn: _real(slot, device) for slot in waiting}
        counts = {fqn: compat.writes_to(tensor) for fqn, tensor in made.items()}
        if callable(getattr(module, "reset_parameters", None)):
            digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
            with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device], device_type=_rng(device)):
                torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
                module.reset_parameters()
        held = {id(tensor) for tensor in _own(module)}
        for fqn, tensor in made.items():
            # A buffer that was replaced by a new one is filled.
            filled = id(tensor) not in held or _written(tensor, counts[fqn])
            info = shard_info(tensor)
            if info is not None:
                tensor.data = own_part(tensor.data, info).clone()
            if not filled:
                unready[fqn] = (tensor, compat.writes_to(tensor))
    return Unready(unready)


def check_init_fn(init_fn: InitFn | None, model: nn.Module) -> None:
    """
    Raises:
        TypeError, ValueError: it cannot be called, or the model has nothing for it to fill.
    """
    if init_fn is None:
        return
    if not callable(init_fn):
        raise TypeError(f"init_fn is a {type(init_fn).__name__}; it must be init_fn(model), filling it in place")
    if not any(slot.tensor.is_meta for slot in scan_state(model)):
        raise ValueError("init_fn fills a model that comes on the meta device; this one has its values already")


def fill_meta(model: nn.Module, device: torch.device, seed: int, init_fn: InitFn | None) -> Unready:
    """Give every tensor on meta memory and values: by `init_fn` or, without one, by `reset_parameters`."""
    return materialize(model, device, seed) if init_fn is None else fill(model, device, init_fn)


@torch.no_grad()
def fill(model: nn.Module, device: torch.device, init_fn: InitFn) -> Unready:
    """Let `init_fn(model)` write the values. A sharded parameter is there the DTensor that this rank holds a part of,
    over the memory of the shard, so nothing is ever whole.

    Raises:
        RuntimeError: it put other parameters in place of writing into these.
    """
    made = {}
    for slot in scan_state(model):
        if slot.tensor.is_meta:
            real = _install(slot, _blank(torch.empty_like(slot.tensor, device=device)))
            made[slot.fqn] = (real, compat.writes_to(real))
    params = [slot for slot in scan_state(model) if slot.is_param]
    views = [nn.Parameter(distributed_view(slot.tensor), slot.tensor.requires_grad) for slot in params]
    with swapped_state(params, views):
        init_fn(model)
        replaced = [slot.fqn for slot, view in zip(params, views, strict=True) if current_tensor(slot) is not view]
    if replaced:
        raise RuntimeError(
            f"init_fn replaced {', '.join(replaced[:5])}: the shards are in memory already; write into the parameters "
            "in place, as torch.nn.init does"
        )
    held = {id(slot.tensor) for slot in scan_state(model)}
    return Unready({name: found for name, found in made.items() if id(found[0]) in held and not _written(*found)})


def _own(module: nn.Module) -> list[torch.Tensor]:
    return [tensor for part in compat.tensor_slots(module) for tensor in part.values() if tensor is not None]


def _real(slot: StateSlot, device: torch.device) -> torch.Tensor:
    """A whole tensor in place of a meta one."""
    info = shard_info(slot.tensor)
    if info is None:
        return _install(slot, _blank(torch.empty_like(slot.tensor, device=device)))
    return _install(slot, _blank(torch.empty(info.global_shape, dtype=slot.tensor.dtype, device=device)))


def _install(slot: StateSlot, real: torch.Tensor) -> torch.Tensor:
    """Put a tensor in place of a meta one, under every name of it; torch cannot move a tensor off meta in place."""
    info = shard_info(slot.tensor)
    if slot.is_param:
        real = nn.Parameter(real, requires_grad=slot.tensor.requires_grad)
    if info is not None:
        set_shard_info(real, info)
    for module, attribute in slot.owners:
        compat.tensor_slots(module)[0 if slot.is_param else 1][attribute] = real
    return real


def _rng(device: torch.device) -> str:
    return "cuda" if device.type == "cpu" else device.type


def common_seed(mesh: DataParallelMesh | None, device: torch.device) -> int:
    """The first rank's seed."""
    seed = torch.tensor(torch.initial_seed() & (2**62 - 1), dtype=torch.int64, device=device)
    if mesh is not None:
        for axis in mesh.axes:
            dist.broadcast(seed, group=axis.group, group_src=0)
    return int(seed)
