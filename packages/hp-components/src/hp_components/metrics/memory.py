"""Memory that a step needed. In: nothing. Out: GiB, of the device (None on the cpu) and of this process."""

from __future__ import annotations

import resource
import sys

from hp_protocols.platform import get_platform

__all__ = ["host_memory_gib", "reset_device_peak", "take_device_memory_gib"]

_GIB = 2**30

_put_aside = 0
"""The peak in bytes that a reset took from the device's only counter, for the next `take_device_memory_gib`."""


def take_device_memory_gib() -> float | None:
    """The device's peak since the last call; None on the cpu, where a process's size is no device's memory."""
    global _put_aside
    if not reset_device_peak():
        return None
    peak, _put_aside = _put_aside, 0
    return peak / _GIB


def reset_device_peak() -> bool:
    """Let the device's peak begin anew for whoever reads it next; `take_device_memory_gib` still knows the one before.

    False on the cpu, which has none.
    """
    global _put_aside
    platform = get_platform()
    peak = platform.max_memory()
    if peak is None:
        return False
    _put_aside = max(_put_aside, peak)
    platform.reset_max_memory()
    return True


def host_memory_gib() -> float:
    """The peak resident size of this process."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024) / _GIB
