"""The end of a run by a fault of a rank. In: a message. Out: an exception that every rank raises."""

from __future__ import annotations

__all__ = ["RankFailure"]


class RankFailure(RuntimeError):
    """A rank died, hung or raised, so that the run ends on all ranks. It has been told on standard error already."""
