"""Folders that a config names inside the run folder. In: such a name. Out: the fault, if it leads elsewhere."""

from __future__ import annotations

from pathlib import Path

from hp_protocols.errors import Fault

__all__ = ["outside_fault"]


def outside_fault(where: str, folder: str) -> Fault | None:
    """A fault unless `folder` is a relative path that stays below the run folder."""
    inside = Path(folder)
    if folder and not inside.is_absolute() and ".." not in inside.parts and inside != Path("."):
        return None
    return Fault(where, f"{folder!r} is not a folder inside the run folder", allowed="a relative path such as `tb`")
