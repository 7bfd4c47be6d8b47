"""A sharded model cannot run eagerly; it says so, gives its whole parameters back for a while, and saves as DTensors.

In: a partitioned model. Out: hooks on it, and the `full_params` context.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from hp_compile import _torch_compat as compat
from hp_compile.mesh import DataParallelMesh
from hp_compile.passes.parallel.shards import as_dtensor, rows_of
from hp_compile.tracer.state import ShardInfo, StateSlot, scan_state, shard_info


class ShardGuard:
    """Hooks of one trainer on its model. `open` lets forward pass: during capture, and inside `full_params`."""

    def __init__(self, model: nn.Module, mesh: DataParallelMesh | None) -> None:
        self.model = model
        self._writes_buffers = mesh is None or mesh.rank == 0
        self._open = 0
        self._whole = False
        self.slots = [slot for slot in saved_slots(model) if slot.is_param]
        sharded = [slot for slot in self.slots if _sharded(slot)]
        if sharded:
            holders = {id(module): module for slot in sharded for module, _ in slot.owners}
            for module in {id(model): model, **holders}.values():
                module.register_forward_pre_hook(self._refuse, prepend=True)
        if any(shard_info(slot.tensor) is not None for slot in self.slots):
            # Plain functions: torch marks the hook with an attribute, which a bound method does not take.
            model.register_state_dict_post_hook(lambda *given: self._as_dtensors(*given))
            model.register_load_state_dict_pre_hook(lambda *given: self._as_local(*given))

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1

    @contextlib.contextmanager
    def full_params(self) -> Iterator[nn.Module]:
        """Within it every parameter is whole; changes made to them inside are dropped at the end."""
        self.refuse_inside("full_params()")
        kept = [(slot.tensor, slot.tensor.data) for slot in self.slots]
        try:
            with torch.no_grad():
                for parameter, local in kept:
                    info = shard_info(parameter)
                    if info is not None and (info.sharded or info.tp_mesh is not None):
                        parameter.data = as_dtensor(local, info).full_tensor()
                    else:
                        # A copy, or changes to a replica would stay, and differ between ranks.
                        parameter.data = local.clone()
            self._whole = True
            with self.open():
                yield self.model
        finally:
            self._whole = False
            for parameter, local in kept:
                parameter.data = local

    def refuse_inside(self, what: str) -> None:
        """Raises RuntimeError inside `full_params`: optimizer, graphs and checkpoints know the shards only."""
        if self._whole:
            raise RuntimeError(
                f"{what} inside full_params(): parameters are whole there for inspection and export "
                "(model.state_dict() has whole tensors); leave the context first"
            )

    def _refuse(self, module: nn.Module, _args: Any) -> None:
        if not self._open:
            raise RuntimeError(
                f"{type(module).__name__}: the model's parameters are sharded by GraphTrainer and forward cannot run "
                "on shards; use trainer.eval_step(input, label) for a loss, or `with trainer.full_params():` for whole "
                "parameters"
            )

    def _as_dtensors(self, _module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
        if self._whole:
            return
        for slot in self.slots:
            info = shard_info(slot.tensor)
            for name in (slot.fqn, *slot.aliases):
                if info is not None and prefix + name in state:
                    state[prefix + name] = saved_form(state[prefix + name], info)
        if self._writes_buffers:
            return
        for name, _ in self.model.named_buffers(remove_duplicate=False):
            if prefix + name in state:
                # Buffers differ between ranks; a checkpoint holds the first rank's, not whichever rank's was idle.
                state[prefix + name] = state[prefix + name].detach()
                state[prefix + name].__create_write_items__ = nothing_to_write

    def _as_local(self, _module: nn.Module, state: dict[str, Any], prefix: str, *_rest: Any) -> None:
        for slot in self.slots:
            info = shard_info(slot.tensor)
            for name in (slot.fqn, *slot.aliases):
                if info is not None and prefix + name in state:
                    state[prefix + name] = loaded_form(state[prefix + name], info, prefix + name)


def nothing_to_write(_fqn: str, _tensor: torch.Tensor) -> list[Any]:
    """The answer to torch's distributed checkpoint of a rank whose value is not the one to be saved."""
    return []


def _sharded(slot: StateSlot) -> bool:
    info = shard_info(slot.tensor)
    return info is not None and (info.sharded or info.tp_mesh is not None)


def saved_form(local: torch.Tensor, info: ShardInfo) -> torch.Tensor:
    """A DTensor over the live local shard for what is sharded; a replica stays a plain tensor."""
    if not info.placement_known:
        raise RuntimeError(
            f"parameter {info.fqn!r} is a plain tensor-parallel shard of undeclared placement and cannot be saved as "
            "part of a whole; declare it in mesh_context.tp_placements, or use a DTensor"
        )
    if local.shape == info.global_shape and not info.sharded and info.tp_mesh is None:
        return local
    return as_dtensor(local, info)


def saved_slots(model: nn.Module) -> list[StateSlot]:
    """Parameters and buffers under the names that a state dict has for them."""
    return [
        replace(slot, fqn=compat.saved_name(slot.fqn), aliases=tuple(map(compat.saved_name, slot.aliases)))
        for slot in scan_state(model)
    ]


def distributed_view(parameter: torch.Tensor, tensor: torch.Tensor | None = None) -> torch.Tensor:
    """A tensor of a parameter's local shape as the part of the whole that it is; it shares memory with the tensor.

    Args:
        parameter: of a model that a GraphTrainer has partitioned; otherwise the tensor is returned as it is.
        tensor: the parameter's gradient, or a part of its optimizer state; default: the parameter itself.

    Returns:
        A DTensor of the true global shape where the parameter is sharded, else the tensor, detached.
    """
    local = (parameter if tensor is None else tensor).detach()
    info = shard_info(parameter)
    return local if info is None or local.shape != parameter.shape else saved_form(local, info)


def loaded_form(value: Any, info: ShardInfo, name: str) -> torch.Tensor:
    """The local part of what was saved: a DTensor of any placement, or the whole tensor."""
    if tuple(value.shape) != tuple(info.global_shape):
        raise ValueError(
            f"{name!r} in the loaded state has shape {tuple(value.shape)}, the model's parameter has "
            f"{tuple(info.global_shape)}; load a state of the same model"
        )
    if not isinstance(value, DTensor):
        if not info.sharded and info.tp_mesh is None:
            return value
        # No communication: every rank holds the whole tensor and takes its own part.
        return own_part(value, info)
    if value.device_mesh == info.mesh and tuple(value.placements) == tuple(info.placements):
        return value.to_local()
    if not info.sharded and info.tp_mesh is None:
        return value.full_tensor()
    return own_part(value.full_tensor(), info)


def own_part(whole: torch.Tensor, info: ShardInfo) -> torch.Tensor:
    """Cut as it was cut: first along the tensor-parallel axis, then rows over the shard axis."""
    if info.tp_mesh is not None:
        whole = distribute_tensor(whole, info.tp_mesh, info.tp_placements, src_data_rank=None).to_local()
    if not info.sharded:
        return whole
    dim = info.shard_dim_of_mesh
    start, count = rows_of(whole.shape[0], info.mesh.size(dim), info.mesh.get_local_rank(dim))
    return whole.narrow(0, start, count)
