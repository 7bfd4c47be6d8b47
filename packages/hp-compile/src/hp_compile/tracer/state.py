"""The tensors of a model as the tracer sees them: unique, named, with the shape that forward works on.

In: a live `nn.Module`, sharded or not. Out: `StateSlot`s, and a context that swaps them for traced tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hp_compile import _torch_compat as compat


@dataclass(frozen=True)
class ShardInfo:
    """Where a live parameter's rows are; carried by each partitioned parameter as `shard_info`.

    Attributes:
        fqn: first name of the parameter.
        unit: name of its unit.
        mesh, placements: true placement over all axes, tensor-parallel ones included.
        global_shape, global_stride: of the whole tensor.
        full_shape: what forward sees on this rank (the tensor-parallel part of the whole).
        sharded: False for a replica.
        shard_dim_of_mesh: which dim of `mesh` is the shard axis.
        tp_mesh, tp_placements: what the parameter was before, if it was a DTensor.
        plain: the tensor-parallel part was a plain tensor with a declared placement; forward sees it as one.
        placement_known: False for a plain tensor-parallel shard whose placement was not declared.
    """

    fqn: str
    unit: str
    mesh: Any
    placements: tuple[Any, ...]
    global_shape: torch.Size
    global_stride: tuple[int, ...]
    full_shape: torch.Size
    sharded: bool
    tp_mesh: Any = None
    tp_placements: tuple[Any, ...] = ()
    shard_dim_of_mesh: int = 0
    plain: bool = False
    placement_known: bool = True


@dataclass(frozen=True)
class StateSlot:
    """One unique tensor of the model and everywhere it is registered."""

    fqn: str
    aliases: tuple[str, ...]
    owners: tuple[tuple[nn.Module, str], ...]
    is_param: bool
    tensor: torch.Tensor

    @property
    def full_shape(self) -> torch.Size:
        info = shard_info(self.tensor)
        if info is not None:
            return info.full_shape
        return local_tensor(self.tensor).shape

    @property
    def owners_ids(self) -> list[tuple[int, str]]:
        return [(id(module), attribute) for module, attribute in self.owners]

    @property
    def trainable(self) -> bool:
        return self.is_param and self.tensor.requires_grad


def shard_info(tensor: torch.Tensor) -> ShardInfo | None:
    return getattr(tensor, "shard_info", None)


def set_shard_info(tensor: torch.Tensor, info: ShardInfo) -> None:
    tensor.shard_info = info  # type: ignore[attr-defined]


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part, detached: what the graph is called with."""
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


def scan_state(model: nn.Module) -> list[StateSlot]:
    """Parameters, then buffers, each once; a tied tensor takes its first name."""
    slots: list[StateSlot] = []
    for is_param in (True, False):
        names: dict[int, list[str]] = {}
        owners: dict[int, list[tuple[nn.Module, str]]] = {}
        tensors: dict[int, torch.Tensor] = {}
        for prefix, module in model.named_modules(remove_duplicate=False):
            own = compat.tensor_slots(module)[0 if is_param else 1]
            for attribute, tensor in own.items():
                if tensor is None:
                    continue
                key = id(tensor)
                tensors[key] = tensor
                names.setdefault(key, []).append(f"{prefix}.{attribute}" if prefix else attribute)
                places = owners.setdefault(key, [])
                if not any(place[0] is module and place[1] == attribute for place in places):
                    places.append((module, attribute))
        slots += [
            StateSlot(found[0], tuple(found[1:]), tuple(owners[key]), is_param, tensors[key])
            for key, found in names.items()
        ]
    return slots


@contextlib.contextmanager
def swapped_state(slots: Sequence[StateSlot], tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Within it every registration of each slot holds the given tensor."""
    for slot, tensor in zip(slots, tensors, strict=True):
        for module, attribute in slot.owners:
            compat.tensor_slots(module)[0 if slot.is_param else 1][attribute] = tensor
    try:
        yield
    finally:
        for slot in slots:
            for module, attribute in slot.owners:
                compat.tensor_slots(module)[0 if slot.is_param else 1][attribute] = slot.tensor


def current_tensor(slot: StateSlot) -> Any:
    module, attribute = slot.owners[0]
    return compat.tensor_slots(module)[0 if slot.is_param else 1].get(attribute)
