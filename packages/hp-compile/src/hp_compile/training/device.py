"""Which device: the one asked for, else npu → cuda → cpu.

In: a name, a torch.device or None. Out: a torch.device that is there, or an error that names what is missing.
"""

from __future__ import annotations

import importlib.util
import os

import torch


def _npu_there() -> bool:
    if importlib.util.find_spec("torch_npu") is None:
        return False
    npu = getattr(torch, "npu", None)
    return npu is not None and npu.is_available()


def resolve_device(asked: str | torch.device | None) -> torch.device:
    """Raises RuntimeError when the device that was asked for is not there."""
    there = {"npu": _npu_there, "cuda": torch.cuda.is_available, "cpu": lambda: True}
    if asked is None:
        return _with_index(torch.device(next(name for name in ("npu", "cuda", "cpu") if there[name]())))
    # The name first: torch does not even know the word npu until torch_npu is imported.
    kind = str(asked).partition(":")[0]
    if kind not in there:
        raise ValueError(f"device={str(asked)!r} is not supported; allowed: npu, cuda, cpu or None")
    if not there[kind]():
        remedy = "install torch_npu and its driver" if kind == "npu" else "install a CUDA build of torch"
        raise RuntimeError(f"device={str(asked)!r} was asked for, but no {kind} is available; {remedy}, or use 'cpu'")
    return _with_index(torch.device(asked))


def _with_index(device: torch.device) -> torch.device:
    """One accelerator per process: the launcher's local rank says which, unless the caller did."""
    if device.type == "cpu" or device.index is not None:
        return device
    local_rank = int(os.environ.get("LOCAL_RANK", "-1"))
    if 0 <= local_rank < torch.accelerator.device_count():
        torch.accelerator.set_device_index(local_rank)
    return torch.device(device.type, torch.accelerator.current_device_index())
