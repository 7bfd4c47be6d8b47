"""Snapshots of the device's memory: every few steps, and when it runs out.

In: a recorder of the allocator's history. Out: pickles that pytorch.org/memory_viz shows.
"""

from __future__ import annotations

import logging
import os
import pickle
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import torch

from hp_protocols.platform import get_platform

__all__ = ["DeviceMemory", "MemoryRecorder", "MemorySnapshots", "is_out_of_memory"]

logger = logging.getLogger(__name__)


class MemoryRecorder(Protocol):
    """Something that remembers what an allocator did."""

    def start(self, max_entries: int) -> None:
        """Record from now on; the last `max_entries` are kept."""

    def snapshot(self) -> Any:
        """What is allocated, and what was recorded, as plain data."""

    def stop(self) -> None:
        """Stop recording."""


class DeviceMemory:
    """The allocator of this process's accelerator."""

    def start(self, max_entries: int) -> None:
        get_platform().start_memory_history(max_entries)

    def snapshot(self) -> Any:
        return get_platform().memory_history()

    def stop(self) -> None:
        get_platform().stop_memory_history()


class MemorySnapshots:
    """Writes `step_<step>/rank<rank>.pickle` every `every` steps, and `step_<step>_exit/…` when memory ran out."""

    def __init__(
        self, recorder: MemoryRecorder, folder: Path, rank: int, *, step: int, every: int, max_entries: int
    ) -> None:
        """
        Args:
            recorder: starts recording at once.
            folder: of the snapshots.
            rank: in the files' names.
            step: training steps done.
            every: steps between snapshots.
            max_entries: how much the recorder remembers.
        """
        self.folder = folder
        self.files: list[Path] = []
        self._recorder = recorder
        self._rank = rank
        self._step = step
        self._every = every
        recorder.start(max_entries)

    def step(self) -> None:
        """A training step is done."""
        self._step += 1
        if self._step % self._every == 0:
            self._write(f"step_{self._step}")

    def close(self, error: BaseException | None) -> None:
        """Stop; if memory ran out in the step that was under way, write what is known of it."""
        try:
            if error is not None and is_out_of_memory(error):
                logger.error("out of memory in step %d; what the device's memory held follows", self._step + 1)
                self._write(f"step_{self._step + 1}_exit")
        finally:
            self._recorder.stop()

    def _write(self, name: str) -> None:
        target = self.folder / name / f"rank{self._rank}.pickle"
        partial = target.with_suffix(".partial")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with partial.open("wb") as file:
                # The viewer, which is written in JavaScript, reads up to protocol 4.
                pickle.dump(self._recorder.snapshot(), file, protocol=4)
            os.replace(partial, target)
        except OSError as error:
            with suppress(OSError):
                partial.unlink()
            logger.error("the memory snapshot %s could not be written: %s", target, error)
            return
        self.files.append(target)
        logger.info("memory snapshot: %s", target)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device had no room left. torch has a class for that; some backends raise a plain RuntimeError."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "out of memory" in str(error).lower()
    )
