"""What a save that did not succeed raises. In: the reason, by rank. Out: `CheckpointError`, the same on all ranks."""

from __future__ import annotations

__all__ = ["CheckpointError"]


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read. Every rank raises it with the same text."""
