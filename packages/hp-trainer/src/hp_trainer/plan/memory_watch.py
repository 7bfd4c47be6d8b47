"""Follows every storage of this thread: how many bytes are held, and for what.

In: the operations that run while it is entered, and what the caller says of some tensors. Out: a list of
`Interval`, one per mark. It counts as torch.distributed._tools.MemTracker does: storages, once each, from the
operation that makes them to the moment the last reference goes.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

from hp_trainer import _torch_compat
from hp_trainer.plan.held import Held, Interval, Use

__all__ = ["MemoryWatch"]

_ORDER = {use: index for index, use in enumerate(Use)}


class MemoryWatch:
    """Enter it around a step. New storages are activations until `hold` says otherwise."""

    def __init__(self) -> None:
        self.intervals: list[Interval] = []
        self._bytes = [0] * len(Use)
        self._total = 0
        self._highest = 0
        self._peak = Held()
        # id of a storage → [bytes, use, weak reference]; torch keeps the object of a storage that is alive.
        self._live: dict[int, list[Any]] = {}
        # Storages that are gone and still counted: the last reference may go in a thread of the communication library.
        self._gone: deque[int] = deque()
        self._quiet = False
        self._phase: tuple[str, int | None] = ("start", None)
        self._start = Held()
        self._wait = _torch_compat.wait_for_collective()
        copies = _torch_compat.fsdp_copies()
        self._gathers = {copies["all_gather_copy_in"], copies["split_with_sizes_copy"]}
        self._reduces = copies["chunk_cat"]

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """While entered, everything counts."""
        with (
            _torch_compat.watch_resizes(self._resized),
            _torch_compat.around_sharding_propagation(self._looking_away),
            _torch_compat.watch_operations(self._on_operation),
        ):
            yield

    @property
    def held(self) -> Held:
        """What is held now."""
        self._settle()
        return Held(*self._bytes)

    def mark(self, phase: str, layer: int | None = None) -> None:
        """End the present interval, and begin one of this name."""
        now = self.held
        self.intervals.append(Interval(*self._phase, self._start, self._peak, now))
        self._phase, self._start, self._peak, self._highest = (phase, layer), now, now, self._total

    def forget(self) -> None:
        """Drop the intervals so far; what is held stays."""
        self.intervals.clear()

    def hold(self, tensor: torch.Tensor, use: Use) -> None:
        """Say what a tensor is for; from now on it counts as that."""
        for plain in _plain(tensor):
            entry = self._entry(plain.untyped_storage())
            before, entry[1] = entry[1], _ORDER[use]
            self._bytes[before] -= entry[0]
            self._bytes[entry[1]] += entry[0]

    def bytes_of(self, tensor: torch.Tensor) -> int:
        """What a tensor's storages take on this rank."""
        return sum(plain.untyped_storage().nbytes() for plain in _plain(tensor))

    # ---- what happens ----------------------------------------------------------------------------------------

    def _on_operation(
        self, run: Any, operator: Any, types: tuple[type, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a distributed tensor runs the operation on its local part
        if self._quiet:
            return run()
        result = run()
        if operator is self._wait:
            return args[0]  # in a pretended world it makes a tensor of its own, which no run has
        self._count(result)
        if operator in self._gathers:
            self._hold_all((args[1] if len(args) > 1 else (), kwargs.get("out", ())), Use.GATHERED)
        elif operator is self._reduces:
            self._hold_all((args, kwargs.get("out", ())), Use.REDUCED)
        return result

    def _count(self, result: Any) -> None:
        if isinstance(result, torch.Tensor):
            self._entry(result.untyped_storage())
        elif isinstance(result, list | tuple):
            for item in result:
                self._count(item)

    def _hold_all(self, given: Any, use: Use) -> None:
        if isinstance(given, torch.Tensor):
            self.hold(given, use)
        elif isinstance(given, list | tuple):
            for item in given:
                self._hold_all(item, use)

    def _entry(self, storage: torch.UntypedStorage) -> list[Any]:
        """What is known of a storage; one that is new is an activation."""
        self._settle()  # first: a new storage may have the id of one that is gone
        key, size, use = id(storage), storage.nbytes(), _ORDER[Use.ACTIVATIONS]
        entry = self._live.get(key)
        if entry is None:
            entry = self._live[key] = [size, use, weakref.ref(storage, lambda _: self._gone.append(key))]
            self._grow(use, size)
        return entry

    def _settle(self) -> None:
        """Take off what is gone, in this thread."""
        while self._gone:
            size, use, _ = self._live.pop(self._gone.popleft())
            self._bytes[use] -= size
            self._total -= size

    def _resized(self, storage: torch.UntypedStorage) -> None:
        entry = self._entry(storage)
        # Only FSDP resizes storages: those of gathered weights.
        before, use, entry[0], entry[1] = entry[0], entry[1], storage.nbytes(), _ORDER[Use.GATHERED]
        self._bytes[use] -= before
        self._total -= before
        self._grow(_ORDER[Use.GATHERED], entry[0])

    def _grow(self, use: int, size: int) -> None:
        self._bytes[use] += size
        self._total += size
        if self._total > self._highest:
            self._highest, self._peak = self._total, Held(*self._bytes)

    @contextlib.contextmanager
    def _looking_away(self) -> Iterator[None]:
        before, self._quiet = self._quiet, True
        try:
            yield
        finally:
            self._quiet = before


def _plain(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors that a distributed tensor, or another wrapper, is made of; a plain tensor itself."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield tensor
        return
    names, _ = flatten()
    for name in names:
        inner = getattr(tensor, name)
        if isinstance(inner, torch.Tensor):
            yield from _plain(inner)
