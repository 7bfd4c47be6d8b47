"""The processes that save together, on a line of their own.

In: nothing. Out: a gloo group beside the default one: a save in the background must not mix its messages with those
of training, and the ranks may have to wait for the slowest disk longer than a step may take.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from hp_protocols.platform import get_platform

__all__ = ["make_group"]

# A rank that dies ends the others' waiting at once; this is for one that still writes.
PATIENCE = timedelta(hours=2)


def make_group() -> dist.ProcessGroup | None:
    """A new group of all ranks; None in a single process without a process group. Collective."""
    if not get_platform().is_initialized():
        return None
    return dist.new_group(backend="gloo", timeout=PATIENCE)
