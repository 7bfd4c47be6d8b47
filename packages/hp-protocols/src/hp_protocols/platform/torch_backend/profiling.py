"""Looking into a running step: the profiler of the device, and the history of its memory.

In: nothing but the device type. Out: `TorchProfiling`, the part of the platform that hands out torch's profiler (on an
npu that of torch_npu, which has the same names) and records what the device's allocator does.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

from hp_protocols.platform.base import Platform
from hp_protocols.platform.capability import Capability, CapabilityError

from . import _torch_compat

__all__ = ["TorchProfiling"]


class TorchProfiling(Platform):
    """torch.profiler, and the memory history of torch.cuda and torch.npu."""

    def profiler_module(self, device: str | None = None) -> ModuleType:
        return importlib.import_module("torch_npu.profiler" if self.device_type(device) == "npu" else "torch.profiler")

    def profiler_activities(self, device: str | None = None) -> list[Any]:
        kind = self.device_type(device)
        known = self.profiler_module(device).ProfilerActivity
        return [known.CPU] if kind == "cpu" else [known.CPU, getattr(known, kind.upper())]

    def has_memory_history(self, device: str | None = None) -> bool:
        return self.device_type(device) != "cpu"

    def start_memory_history(self, max_entries: int, device: str | None = None) -> None:
        _torch_compat.record_memory_history(self._memory_module(device), max_entries)

    def memory_history(self, device: str | None = None) -> Any:
        return _torch_compat.memory_snapshot(self._memory_module(device))

    def stop_memory_history(self, device: str | None = None) -> None:
        _torch_compat.record_memory_history(self._memory_module(device), None)

    def _memory_module(self, device: str | None) -> ModuleType:
        kind = self.device_type(device)
        if kind == "cpu":
            hint = "the cpu has no caching allocator whose history could be kept"
            raise CapabilityError("start_memory_history", Capability.PROFILING, self.name, hint)
        return _torch_compat.memory_module(kind)
