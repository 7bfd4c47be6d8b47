"""Process groups and collectives that also work in a single process, started without any launcher.

In: the launcher's variables (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), or none of them. Out:
`TorchCollectives`, the communication half of the platform.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hp_protocols.errors import ConfigError, Fault
from hp_protocols.platform.base import Platform

from . import _torch_compat

__all__ = ["TorchCollectives"]

_torch_compat.one_thread_per_gloo_group()

T = TypeVar("T")
Group = dist.ProcessGroup | DeviceMesh | None

_REDUCTIONS = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}


class TorchCollectives(Platform):
    """torch.distributed; without a process group every call behaves as in a world of one process."""

    def init_process_group(
        self, timeout: timedelta | float = 300.0, device: str | None = None, backend: str | None = None
    ) -> None:
        if dist.is_initialized():
            raise RuntimeError("there is a process group already; call destroy_process_group() first")
        _torch_compat.forget_sharding_decisions()
        kind = self.device_type(device)
        limit = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
        backend = backend or _default_backend(kind)
        if _launched():
            dist.init_process_group(backend, timeout=limit)
        else:
            # A store in memory: no port, no file, no variable of the environment.
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=limit)

    @contextmanager
    def pretended_world(self, world_size: int, rank: int = 0) -> Iterator[None]:
        if dist.is_initialized():
            raise RuntimeError("there is a process group already; a pretended world needs a process without one")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank={rank} is no rank of a world of {world_size} processes")
        _torch_compat.forget_sharding_decisions()
        _torch_compat.start_fake_process_group(rank, world_size, timedelta(seconds=60))
        try:
            yield
        finally:
            dist.destroy_process_group()

    def host_store(self) -> dist.TCPStore:
        # Port 0: the system picks a free one while binding, so nobody can take it in between.
        return dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)

    def destroy_process_group(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def is_initialized(self) -> bool:
        return dist.is_available() and dist.is_initialized()

    def rank(self, group: Group = None) -> int:
        return dist.get_rank(_process_group(group)) if self.is_initialized() else 0

    def world_size(self, group: Group = None) -> int:
        return dist.get_world_size(_process_group(group)) if self.is_initialized() else 1

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum", group: Group = None) -> torch.Tensor:
        if op not in _REDUCTIONS:
            raise ValueError(f"op={op!r} is no reduction; allowed: {', '.join(_REDUCTIONS)}")
        if self.is_initialized():
            dist.all_reduce(tensor, op=_REDUCTIONS[op], group=_process_group(group))
        return tensor

    def all_gather(self, tensor: torch.Tensor, group: Group = None) -> list[torch.Tensor]:
        if not self.is_initialized():
            return [tensor.clone()]
        gathered = [torch.empty_like(tensor) for _ in range(self.world_size(group))]
        dist.all_gather(gathered, tensor.contiguous(), group=_process_group(group))
        return gathered

    def broadcast(self, tensor: torch.Tensor, src: int = 0, group: Group = None) -> torch.Tensor:
        self._check_source(src, group)
        if self.is_initialized():
            dist.broadcast(tensor, group_src=src, group=_process_group(group))
        return tensor

    def barrier(self, group: Group = None) -> None:
        if self.is_initialized():
            dist.barrier(group=_process_group(group))

    def all_gather_object(self, obj: T, group: Group = None) -> list[T]:
        if not self.is_initialized():
            return [obj]
        gathered: list[Any] = [None] * self.world_size(group)
        dist.all_gather_object(gathered, obj, group=_process_group(group))
        return gathered

    def broadcast_object(self, obj: T, src: int = 0, group: Group = None) -> T:
        self._check_source(src, group)
        if not self.is_initialized():
            return obj
        box = [obj]
        dist.broadcast_object_list(box, group_src=src, group=_process_group(group))
        return box[0]

    def _check_source(self, src: int, group: Group) -> None:
        if not 0 <= src < (size := self.world_size(group)):
            raise ValueError(f"src={src} is no rank of a group of {size} processes")


def _process_group(group: Group) -> dist.ProcessGroup | None:
    if not isinstance(group, DeviceMesh):
        return group
    if group.ndim != 1:
        raise ValueError(f"a collective runs over one mesh axis; this mesh has {group.mesh_dim_names or group.ndim}")
    return group.get_group()


def _default_backend(kind: str) -> str:
    backend = dist.get_default_backend_for_device(kind)
    # Objects, checkpoints and host-side flags travel as cpu tensors, which nccl and hccl cannot send.
    return backend if kind == "cpu" else f"cpu:gloo,{kind}:{backend}"


def _launched() -> bool:
    """Whether a launcher described a world. RANK and WORLD_SIZE decide; then the address is needed too."""
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        return False
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ConfigError(
            Fault(
                ", ".join(missing),
                "not set, although other variables of a launcher are",
                hint="start with torchrun, set all four, or unset RANK and WORLD_SIZE for a single process",
            )
        )
    return True
