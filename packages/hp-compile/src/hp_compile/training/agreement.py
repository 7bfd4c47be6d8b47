"""Ranks agree before they communicate: a rank that cannot or would not join stops all of them (G7).

In: what this rank is about to do. Out: nothing, or the same kind of error on every rank of the data-parallel group.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hp_compile.mesh import DataParallelMesh
from hp_compile.tracer.state import StateSlot, local_tensor

HIT, MISS, FAULT = 0, 1, 2


@dataclass(frozen=True)
class Verdict:
    """The worst status of all ranks, and whether all had the same schedule."""

    status: int
    same_schedule: bool


def schedule_hash(schedule: object) -> int:
    """A positive 62-bit number: its negation must fit too."""
    return int.from_bytes(hashlib.sha256(repr(schedule).encode()).digest()[:8], "little") >> 2


class Agreement:
    """Compares a few integers over all axes of the mesh."""

    def __init__(self, mesh: DataParallelMesh | None) -> None:
        self._mesh = mesh if mesh is not None and mesh.size > 1 else None
        # The maximum of x and of -x is equal up to sign only if all x are equal.
        self._device = torch.device(mesh.device_mesh.device_type if mesh is not None else "cpu")

    def compare(self, status: int, schedule: int) -> Verdict:
        if self._mesh is None:
            return Verdict(status, True)
        values = torch.tensor([status, schedule, -schedule], dtype=torch.int64, device=self._device)
        self._maximum(values)
        worst, high, low = values.tolist()
        return Verdict(worst, high == -low)

    def raise_together(self, fault: BaseException | None) -> None:
        """Raise this rank's fault, or one that quotes the other ranks' faults."""
        if self._mesh is None:
            if fault is not None:
                raise fault
            return
        said = None if fault is None else f"{type(fault).__name__}: {fault}"
        texts: dict[int, str] = {}
        mine = {self._mesh.rank: said} if said else {}
        gathered = mine
        for axis in self._mesh.axes:
            parts: list[dict[int, str] | None] = [None] * axis.size
            dist.all_gather_object(parts, gathered, group=axis.group)
            gathered = {rank: text for part in parts for rank, text in (part or {}).items()}
        texts = gathered
        if fault is not None:
            raise fault
        quoted = "; ".join(f"rank {rank} of the data-parallel group: {text}" for rank, text in sorted(texts.items()))
        raise RuntimeError(f"the step was stopped on every rank because of {quoted}")

    def schedules_differ(self, schedule: list[tuple[object, ...]]) -> None:
        """Raise on every rank, with what this rank would have done."""
        assert self._mesh is not None
        shown = ", ".join(f"{entry[0]} {entry[-1] or '(root)'}" for entry in schedule[:6])
        raise RuntimeError(
            f"rank {self._mesh.rank} of the data-parallel group: the ranks' steps issue different collectives (here "
            f"{len(schedule)}: {shown}{', …' if len(schedule) > 6 else ''}). Every rank must use the same parameters "
            "in a step: give all ranks the same flags, and let unused branches take part with weight 0"
        )

    def same_weights(self, slots: list[StateSlot]) -> list[str]:
        """Names of parameters whose values differ between ranks."""
        if self._mesh is None:
            return []
        slots = [slot for slot in slots if slot.is_param]
        sums = torch.tensor([_checksum(local_tensor(slot.tensor)) for slot in slots], dtype=torch.int64)
        values = torch.cat([sums, -sums]).to(self._device)
        self._maximum(values)
        high, low = values.cpu().split(len(slots))
        return [slot.fqn for slot, a, b in zip(slots, high.tolist(), low.tolist(), strict=True) if a != -b]

    def broadcast(self, slots: list[StateSlot]) -> None:
        """Every rank takes the values of the first rank of each axis."""
        if self._mesh is None:
            return
        for slot in slots:
            tensor = local_tensor(slot.tensor)
            for axis in self._mesh.axes:
                held = tensor.contiguous()
                dist.broadcast(held, group=axis.group, group_src=0)
                tensor.copy_(held)

    def _maximum(self, values: torch.Tensor) -> None:
        assert self._mesh is not None
        for axis in self._mesh.axes:
            if axis.size > 1:
                dist.all_reduce(values, op=dist.ReduceOp.MAX, group=axis.group)


def _checksum(tensor: torch.Tensor) -> int:
    """Of the bits, not the values: nan is equal to itself and -0.0 is not 0.0."""
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
        whole = {4: torch.int32, 8: torch.int64}[tensor.element_size()]
    bits = tensor.contiguous().view(whole).flatten().to(torch.int64)
    weights = torch.arange(1, bits.numel() + 1, device=bits.device) % 65521
    return int((bits * weights).sum()) >> 2
