"""One thing the doctor has looked at.

In: what was found. Out: a `Finding`, the same for the terminal and for JSON.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Finding", "Level"]


class Level(StrEnum):
    """OK: as it should be. OPTIONAL: absent, and nothing that is installed needs it. WARNING: it works, less well.
    BROKEN: training cannot work like this."""

    OK = "ok"
    OPTIONAL = "optional"
    WARNING = "warning"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class Finding:
    """What was looked at, what is there, and what to do about it if it is not as it should be."""

    subject: str
    level: Level
    found: str
    remedy: str | None = None
