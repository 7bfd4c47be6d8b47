"""What the older file says of this process among the others: its group's backend, its rank on the machine.

In: `train.comm_backend`, `train.local_rank`. Out: `Fault`s; the process environment as a launcher would leave it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch.distributed as dist

from hp_protocols.errors import Fault

__all__ = ["backend_faults", "local_rank"]

NO_BACKENDS = ("fake", "undefined")
"""What torch lists beside the real ones: ranks that train without hearing of each other."""


def backend_faults(given: str | None, device_type: str) -> list[Fault]:
    """What is wrong with a backend, or with one per kind of device (`cpu:gloo,cuda:nccl`)."""
    if given is None:
        return []
    able = {name: devices for name, devices in dist.Backend.backend_capability.items() if name not in NO_BACKENDS}
    usable = [name for name, devices in able.items() if dist.is_backend_available(name) and device_type in devices]
    allowed = f"{', '.join(usable)} (for {device_type})"
    faults, devices = [], list[str]()
    for part in given.split(","):
        device, colon, name = part.strip().rpartition(":")
        devices += [device] if colon else able.get(name, [])
        if name not in able or not dist.is_backend_available(name):
            built = "is no backend of torch" if name not in able else "is not in this build of torch"
            faults.append(Fault("train.comm_backend", f"{name!r} {built}", allowed))
    if not faults and device_type not in devices:
        faults.append(Fault("train.comm_backend", f"{given!r} does not serve {device_type}", allowed))
    return faults


@contextlib.contextmanager
def local_rank(rank: int) -> Iterator[None]:
    """LOCAL_RANK where no launcher has set it, as the older launcher did; nothing stays behind."""
    if "LOCAL_RANK" in os.environ:
        yield
        return
    os.environ["LOCAL_RANK"] = str(rank)
    try:
        yield
    finally:
        del os.environ["LOCAL_RANK"]
