"""Numbers as people read them. In: seconds and shares. Out: short texts."""

from __future__ import annotations

__all__ = ["duration", "share"]


def duration(seconds: float) -> str:
    """`9s`, `1m32s`, `2h05m`, `3d04h`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def share(value: float | None) -> str:
    """`41.2%`; `n/a` for what is not known."""
    return "n/a" if value is None else f"{value:.1%}"
