"""The private torch APIs that hp-trainer uses, each with a check that says which torch has it.

In: plain values. Out: the effect; `RuntimeError` where the running torch lacks the API.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d


def set_collective_timeout(timeout: timedelta, leave: dist.ProcessGroup | None = None) -> None:
    """How long a collective may wait from now on, in every process group of this process but `leave`.

    Public torch sets a timeout only when a group is made (torch 2.13).
    """
    setter = getattr(distributed_c10d, "_set_pg_timeout", None)
    groups = getattr(getattr(distributed_c10d, "_world", None), "pg_map", None)
    if setter is None or groups is None:
        raise RuntimeError(
            f"torch {torch.__version__} has no distributed_c10d._set_pg_timeout; hp-trainer needs torch >=2.13,<2.15"
        )
    if not dist.is_initialized():
        return
    # A rank that is still busy with the old limit must not meet one with the new.
    dist.barrier()
    for group in list(groups):
        if group is not leave:
            setter(timeout, group)
