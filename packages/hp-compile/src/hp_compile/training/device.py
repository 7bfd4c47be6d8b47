"""Which device: the one asked for, else npu → cuda → cpu.

In: a name, a torch.device or None. Out: a torch.device that is there, or an error that names what is missing.
"""

from __future__ import annotations

import importlib.util

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
        return torch.device(next(name for name in ("npu", "cuda", "cpu") if there[name]()))
    device = torch.device(asked)
    if device.type not in there:
        raise ValueError(f"device={asked!r} is not supported; allowed: npu, cuda, cpu or None")
    if not there[device.type]():
        remedy = "install torch_npu and its driver" if device.type == "npu" else "install a CUDA build of torch"
        raise RuntimeError(f"device={asked!r} was asked for, but no {device.type} is available; {remedy}, or use 'cpu'")
    return device
