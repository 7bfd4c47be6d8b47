"""The profiler of a training run: a context around the loop that is told after every step.

In: a `Profiler.Config`, the run folder, the step after which training goes on. Out: traces and memory snapshots in
the run folder; nothing at all, and next to no time, when both are switched off (M36).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from hp_components.profiler.options import ProfilerOptions
from hp_protocols.configurable import Configurable
from hp_protocols.errors import ConfigError

if TYPE_CHECKING:
    from hp_components.profiler.memory import MemoryRecorder, MemorySnapshots
    from hp_components.profiler.traces import TraceRecorder

__all__ = ["Profiler"]


class Profiler(Configurable):
    """Records steps by a schedule over the run's steps, so that a resumed run records the same ones.

    Example::

        with profiler.active(step):
            for batch in batches:
                train(batch)
                profiler.step()
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ProfilerOptions):
        """See `ProfilerOptions`."""

    def __init__(
        self,
        config: Config,
        *,
        run_folder: str | os.PathLike[str],
        rank: int = 0,
        memory: MemoryRecorder | None = None,
    ) -> None:
        """
        Args:
            config: see `Config`.
            run_folder: where the files go.
            rank: every rank writes files of its own.
            memory: what remembers allocations; by default the device of this process.

        Raises:
            ConfigError: values that no run could have, or memory snapshots on a device without a memory history.
        """
        faults = config.faults("profiler") + (config.machine_faults("profiler") if memory is None else [])
        if faults:
            raise ConfigError(faults)
        self.config = config
        self._run_folder = Path(run_folder)
        self._rank = rank
        self._memory = memory
        self._first_step = 0
        self._traces: TraceRecorder | None = None
        self._snapshots: MemorySnapshots | None = None
        self._files: list[Path] = []

    @property
    def files(self) -> list[Path]:
        """What this rank has written, in order."""
        own = [part.files for part in (self._traces, self._snapshots) if part is not None]
        return [*self._files, *(path for files in own for path in files)]

    def active(self, step: int = 0) -> Self:
        """A context for the loop that goes on after `step`."""
        self._first_step = step
        return self

    def step(self) -> None:
        """A training step is done."""
        if self._traces is not None:
            self._traces.step()
        if self._snapshots is not None:
            self._snapshots.step()

    def __enter__(self) -> Self:
        config = self.config
        if config.enable_memory_snapshot:
            from hp_components.profiler.memory import DeviceMemory, MemorySnapshots

            self._snapshots = MemorySnapshots(
                self._memory if self._memory is not None else DeviceMemory(),
                self._run_folder / config.save_memory_snapshot_folder,
                self._rank,
                step=self._first_step,
                every=config.profile_freq,
                max_entries=config.memory_snapshot_max_entries,
            )
        if config.enable_profiling:
            from hp_components.profiler.traces import TraceRecorder

            folder = self._run_folder / config.save_traces_folder
            self._traces = TraceRecorder(config, folder, self._rank, self._first_step)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # First: the trace needs memory, too.
        if self._snapshots is not None:
            self._snapshots.close(error)
        if self._traces is not None:
            self._traces.close(failed=error is not None)
        self._files = self.files
        self._snapshots = self._traces = None
