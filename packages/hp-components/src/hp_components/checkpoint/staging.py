"""A copy of what this rank writes, so that training can go on while it is written.

In: a rank's pieces of a save, live. Out: the same pieces in host memory, as they were at that moment. The memory is
kept between saves: getting it anew costs many times more than copying into it.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultSavePlanner, SavePlan
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem

__all__ = ["Stage", "StagedPieces"]

Piece = torch.Tensor | io.BytesIO


class StagedPieces(DefaultSavePlanner):
    """Finds the copied pieces for torch's writer, as a planner finds the live ones."""

    def __init__(self, pieces: Mapping[MetadataIndex, Piece], copied: torch.Event | None = None) -> None:
        super().__init__()
        self._pieces = pieces
        self._copied = copied

    def wait(self) -> None:
        """Until the copies are there: those into pinned memory run behind the device's own work."""
        if self._copied is not None:
            self._copied.synchronize()

    def resolve_data(self, write_item: WriteItem) -> Piece:
        return self._pieces[write_item.index]


class Stage:
    """Host memory for one save at a time.

    Args:
        pinned: page-locked memory, into which an accelerator copies without the host waiting. The copies are in the
            order of the device's stream, so what the stream does later does not show in them.
    """

    def __init__(self, *, pinned: bool = False) -> None:
        self.pinned = pinned
        self._buffers: dict[MetadataIndex, torch.Tensor] = {}

    @torch.no_grad()
    def copy(self, plan: SavePlan, live: DefaultSavePlanner) -> StagedPieces:
        """Copy the pieces of `plan`. The copies of an earlier call are overwritten."""
        pieces: dict[MetadataIndex, Piece] = {}
        for item in plan.items:
            data = live.resolve_data(item)
            pieces[item.index] = self._kept(item.index, data.detach()) if isinstance(data, torch.Tensor) else data
        return StagedPieces(pieces, self._mark() if self.pinned else None)

    def close(self) -> None:
        """Give the memory back."""
        self._buffers.clear()

    def _kept(self, index: MetadataIndex, data: torch.Tensor) -> torch.Tensor:
        buffer = self._buffers.get(index)
        if buffer is None or buffer.shape != data.shape or buffer.dtype != data.dtype:
            buffer = torch.empty(data.shape, dtype=data.dtype, pin_memory=self.pinned)
            self._buffers[index] = buffer
        return buffer.copy_(data, non_blocking=self.pinned and not data.is_cpu)

    @staticmethod
    def _mark() -> torch.Event:
        event: Any = torch.Event(torch.accelerator.current_accelerator())
        event.record(torch.accelerator.current_stream())
        return event
