"""Memory that a step needed. In: nothing. Out: GiB, of the device (None on the cpu) and of this process."""

from __future__ import annotations

import resource
import sys

from hp_protocols.platform import get_platform

__all__ = ["host_memory_gib", "take_device_memory_gib"]

_GIB = 2**30


def take_device_memory_gib() -> float | None:
    """The device's peak since the last call; None on the cpu, where a process's size is no device's memory."""
    platform = get_platform()
    peak = platform.max_memory()
    if peak is None:
        return None
    platform.reset_max_memory()
    return peak / _GIB


def host_memory_gib() -> float:
    """The peak resident size of this process."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024) / _GIB
