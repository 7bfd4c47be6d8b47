"""What happens inside a step: traces of operators, snapshots of the device's memory (M36).

In: a `Profiler.Config` and the training loop, which says after each step that one is done. Out: files in the run
folder that the standard viewers open. The names below are imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hp_components.profiler.memory import DeviceMemory, MemoryRecorder
    from hp_components.profiler.profiler import Profiler

__all__ = ["DeviceMemory", "MemoryRecorder", "Profiler"]

_HOME = {"DeviceMemory": "memory", "MemoryRecorder": "memory", "Profiler": "profiler"}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
