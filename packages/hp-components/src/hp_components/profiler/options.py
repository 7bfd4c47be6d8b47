"""The knobs of the profiler, with torchtitan's names and meanings, and what is wrong with them.

In: values. Out: `ProfilerOptions`, the base of `Profiler.Config`, and its faults: of the values, and of this machine.
"""

from __future__ import annotations

from dataclasses import dataclass

from hp_components._folders import outside_fault
from hp_protocols.configurable import Configurable
from hp_protocols.errors import Fault
from hp_protocols.platform import get_platform

__all__ = ["ProfilerOptions"]

# field → the least value
_LEAST = {
    "profile_freq": 1,
    "profiler_active": 1,
    "profiler_warmup": 0,
    "profiler_repeat": 1,
    "profiler_skip_first": 0,
    "profiler_skip_first_wait": 0,
}


@dataclass(kw_only=True, slots=True)
class ProfilerOptions(Configurable.Config):
    """What to record when. A cycle of `profile_freq` steps ends with `profiler_active` recorded ones."""

    enable_profiling: bool = False
    """Record traces of what the host and the device do."""

    save_traces_folder: str = "profiling/traces"
    """Folder of the traces, inside the run folder."""

    profile_freq: int = 10
    """Steps from one trace to the next, and from one memory snapshot to the next."""

    profiler_active: int = 1
    """Steps in a trace: the last ones of a cycle."""

    profiler_warmup: int = 3
    """Steps before them in which the profiler runs and nothing is kept; starting it slows the first ones down."""

    profiler_repeat: int | None = None
    """The number of traces, counted from the run's first step; None: as many as the run is long."""

    profiler_skip_first: int | None = None
    """Steps before the first cycle."""

    profiler_skip_first_wait: int | None = None
    """Not 0: the first cycle begins with its warm-up at once."""

    record_shapes: bool = True
    """Keep the shapes of the operators' inputs."""

    with_stack: bool = False
    """Keep file and line of each operator's call; slow, and traces grow several times."""

    profile_memory: bool = False
    """Keep every allocation of a tensor in the trace, also on the cpu."""

    gzip_traces: bool = False
    """Write .json.gz, a tenth of the size; Perfetto, chrome://tracing and TensorBoard read it as it is."""

    enable_memory_snapshot: bool = False
    """Record the device's allocations; write them every `profile_freq` steps and when memory runs out."""

    save_memory_snapshot_folder: str = "profiling/memory_snapshot"
    """Folder of the memory snapshots, inside the run folder."""

    memory_snapshot_max_entries: int = 100_000
    """Allocations and releases that a snapshot remembers: the last ones."""

    def faults(self, path: str) -> list[Fault]:
        """Values that no run could have."""
        faults = [
            Fault(f"{path}.{name}", f"{value} is too small", allowed=f"{least} or more")
            for name, least in (_LEAST | {"memory_snapshot_max_entries": 1}).items()
            if (value := getattr(self, name)) is not None and value < least
        ]
        for name in ("save_traces_folder", "save_memory_snapshot_folder"):
            if fault := outside_fault(f"{path}.{name}", getattr(self, name)):
                faults.append(fault)
        # Only where it matters: a small profile_freq is a good one for memory snapshots alone.
        needed = self.profiler_warmup + self.profiler_active
        if not faults and self.enable_profiling and needed > self.profile_freq:
            faults.append(
                Fault(
                    f"{path}.profile_freq, {path}.profiler_warmup, {path}.profiler_active",
                    f"{self.profiler_warmup} steps of warm-up and {self.profiler_active} recorded ones do not fit into "
                    f"a cycle of {self.profile_freq} steps",
                    allowed=f"profiler_warmup + profiler_active <= profile_freq ({needed} <= {self.profile_freq})",
                    hint=self._closest_cycle(path),
                )
            )
        return faults

    def machine_faults(self, path: str) -> list[Fault]:
        """What this machine lacks for a run with these values; another one may have it."""
        if not self.enable_memory_snapshot or get_platform().has_memory_history():
            return []
        return [
            Fault(
                f"{path}.enable_memory_snapshot",
                "records the allocator of an accelerator, and this run is on the cpu, which has none",
                hint=f"--{path}.enable_profiling --{path}.profile_memory keeps every allocation in the traces",
            )
        ]

    def _closest_cycle(self, path: str) -> str:
        warmup = self.profile_freq - self.profiler_active
        if warmup >= 0:
            return f"--{path}.profiler_warmup={warmup}"
        return f"--{path}.profile_freq={self.profiler_warmup + self.profiler_active}"
