"""Ranks agree before they communicate: a rank that cannot or would not join stops all of them (G7).

In: what this rank is about to do. Out: its result; or, on every rank of the group, an error that says which rank
failed at what. Every stage of a build that can fail on one rank alone goes through `Agreement.agree`.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from hp_compile.mesh import DataParallelMesh, MeshAxis, axes_of
from hp_compile.tracer.state import StateSlot, local_tensor
from hp_compile.training.roll_call import Group, leave_notice, roll_call
from hp_compile.training.start import Start

T = TypeVar("T")
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
    """One per trainer. The ranks `meet` once, through the store; from then on they compare integers by collectives.

    Until they have met, a rank that fails leaves a notice for those who will wait for it. Ranks of a tensor-parallel
    axis run the same steps, so they hear of each other's faults; schedules are compared along the data-parallel axes.
    """

    def __init__(self) -> None:
        self._axes: list[MeshAxis] = []
        self._others: list[MeshAxis] = []
        self._device = torch.device("cpu")
        self._met = False

    def agree(self, stage: str, action: Callable[[], T]) -> T:
        """`action()`, which must not communicate, on every rank; or an error on every rank.

        Raises:
            Exception: this rank's own fault, as it was raised.
            RuntimeError: another rank failed; the text says which, while doing what, and quotes it.
        """
        return self.compare(stage, action, lambda _: (HIT, 0))[0]

    def compare(
        self, stage: str, action: Callable[[], T], described: Callable[[T], tuple[int, int]]
    ) -> tuple[T, Verdict]:
        """Like `agree`, and in the same collective a status and a hash of each rank's result are compared."""
        result: Any = None
        status, schedule, fault = FAULT, 0, None
        try:
            result = action()
            status, schedule = described(result)
        except Exception as error:
            fault = error
        if not self._met:
            if fault is not None:
                _leave_word(stage, fault)
                raise fault
            return result, Verdict(status, True)
        verdict = self._worst(status, schedule)
        if verdict.status == FAULT:
            self._raise_together(stage, fault)
        return result, verdict

    def meet(self, start: Start) -> None:
        """Wait for every rank that takes part; compare what they would build. Nothing is communicated before this.

        Raises:
            RuntimeError: a rank has failed, or its `plans` differ; it is named.
        """
        layout = start.layout
        groups = []
        if layout is not None and layout.mesh is None:
            groups = [Group("world", range(dist.get_world_size()), start.plans)]
        elif layout is not None and layout.mesh is not None:
            groups = [_group(axis, start.plans) for axis in axes_of(layout.mesh)]
        faults = roll_call([*groups, *(_group(axis) for axis in start.others)])
        if faults:
            raise _stopped(faults)

    def over(self, mesh: DataParallelMesh | None, others: Sequence[MeshAxis], device: torch.device) -> None:
        """From now on faults are told by collectives over these axes."""
        self._axes = [axis for axis in mesh.axes if axis.size > 1] if mesh is not None else []
        self._others = list(others)
        self._device = device
        self._met = bool(self._axes or self._others)

    def _worst(self, status: int, schedule: int) -> Verdict:
        # The maximum of x and of -x is equal up to sign only if all x are equal.
        worst, high, low = self._maximum([status, schedule, -schedule], self._axes)
        differs = int(high != -low)
        if self._others:
            worst, differs = self._maximum([worst, differs], self._others)
        return Verdict(worst, not differs)

    def _raise_together(self, stage: str, fault: BaseException | None) -> None:
        """Raise this rank's fault, or one that quotes the other ranks' faults."""
        faults = {} if fault is None else {dist.get_rank(): _quoted(stage, fault)}
        for axis in (*self._axes, *self._others):
            parts: list[dict[int, str] | None] = [None] * axis.size
            dist.all_gather_object(parts, faults, group=axis.group)
            faults = {rank: text for part in parts for rank, text in (part or {}).items()}
        if fault is None:
            raise _stopped(faults)
        _note(stage, fault)
        raise fault

    def schedules_differ(self, schedule: list[tuple[object, ...]]) -> None:
        """Raise on every rank, with what this rank would have done."""
        shown = ", ".join(f"{entry[0]} {entry[-1] or '(root)'}" for entry in schedule[:6])
        raise RuntimeError(
            f"rank {dist.get_rank()}: the ranks' steps issue different collectives (here {len(schedule)}: {shown}"
            f"{', …' if len(schedule) > 6 else ''}). Every rank must use the same parameters in a step: give all "
            "ranks the same flags, and let unused branches take part with weight 0"
        )

    def differing_weights(self, slots: list[StateSlot]) -> list[str]:
        """Names of parameters whose values differ between ranks of the data-parallel group; the same on all of it."""
        slots = [slot for slot in slots if slot.is_param and not slot.tensor.is_meta]
        sums = [_checksum(local_tensor(slot.tensor)) for slot in slots]
        highs_lows = self._maximum([*sums, *(-value for value in sums)], self._axes)
        high, low = highs_lows[: len(slots)], highs_lows[len(slots) :]
        return [slot.fqn for slot, a, b in zip(slots, high, low, strict=True) if a != -b]

    def broadcast(self, slots: list[StateSlot]) -> None:
        """Every rank takes the values of the first rank of each axis."""
        for slot in slots:
            if slot.tensor.is_meta:
                continue
            tensor = local_tensor(slot.tensor)
            for axis in self._axes:
                held = tensor.contiguous()
                dist.broadcast(held, group=axis.group, group_src=0)
                tensor.copy_(held)

    def _maximum(self, values: list[int], axes: list[MeshAxis]) -> list[int]:
        compared = torch.tensor(values, dtype=torch.int64, device=self._device)
        for axis in axes:
            dist.all_reduce(compared, op=dist.ReduceOp.MAX, group=axis.group)
        return compared.tolist()


def _group(axis: MeshAxis, plans: dict[str, str] | None = None) -> Group:
    return Group(axis.group_name, dist.get_process_group_ranks(axis.group), plans)


def _quoted(stage: str, fault: BaseException) -> str:
    return f"while {stage}: {type(fault).__name__}: {fault}"


def _note(stage: str, fault: BaseException) -> None:
    fault.add_note(f"(on rank {dist.get_rank()}, while {stage}; the other ranks are stopped with this message)")


def _leave_word(stage: str, fault: BaseException) -> None:
    try:
        if leave_notice(_quoted(stage, fault)):
            _note(stage, fault)
    except dist.DistError as lost:
        fault.add_note(f"(the other ranks could not be told: {lost})")


def _stopped(faults: dict[int, str]) -> RuntimeError:
    quoted = "; ".join(f"rank {rank}, {text}" for rank, text in sorted(faults.items()))
    return RuntimeError(f"GraphTrainer is stopped on every rank because of {quoted}")


def _checksum(tensor: torch.Tensor) -> int:
    """Of the bits, not the values: nan is equal to itself and -0.0 is not 0.0. Positive, 62 bits."""
    held = tensor.detach().cpu().contiguous()
    # The memory itself: numpy, torch's own way to bytes, is not among what this package requires.
    bits = ctypes.string_at(held.data_ptr(), held.nbytes) if held.nbytes else b""
    return int.from_bytes(hashlib.blake2b(bits, digest_size=8).digest(), "little") >> 2
