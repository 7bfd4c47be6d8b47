"""Which device this process uses, and its memory and queues.

In: HP_DEVICE or an argument, and what torch can see. Out: `TorchDevices`, the device half of the platform. The
cpu has no queue and no device memory: there the same calls do nothing and figures are None.
"""

from __future__ import annotations

import importlib.util
import os
import platform as host
from collections.abc import Mapping
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

import torch

from hp_protocols.errors import ConfigError, Fault
from hp_protocols.platform.base import Platform

__all__ = ["DEVICE_VARIABLE", "TorchDevices"]

DEVICE_VARIABLE = "HP_DEVICE"
_PROBING_ORDER = ("npu", "cuda", "cpu")


class TorchDevices(Platform):
    """npu, cuda and cpu through torch's device modules (`torch.npu`, `torch.cuda`), which share their names."""

    def device_type(self, requested: str | None = None) -> str:
        if requested is not None:
            return _forced(requested, "device")
        if (forced := os.environ.get(DEVICE_VARIABLE)) is not None:
            return _forced(forced, DEVICE_VARIABLE)
        return next(kind for kind in _PROBING_ORDER if _is_present(kind))

    def device(self, local_rank: int | None = None, device: str | None = None) -> torch.device:
        kind = self.device_type(device)
        index = _local_rank() if local_rank is None else local_rank
        if kind == "cpu":
            return torch.device("cpu")
        count = self.device_count(kind)
        if not 0 <= index < count:
            raise ConfigError(
                Fault(
                    "LOCAL_RANK" if local_rank is None else "local_rank",
                    f"{index} is not the index of a {kind} device; this host has {count}",
                    allowed=f"0 to {count - 1}",
                    hint="start as many processes per host as it has devices",
                )
            )
        _device_module(kind).set_device(index)
        return torch.device(kind, index)

    def device_count(self, device: str | None = None) -> int:
        kind = self.device_type(device)
        return 1 if kind == "cpu" else _device_module(kind).device_count()

    def device_name(self, device: str | None = None) -> str:
        kind = self.device_type(device)
        return host.machine() if kind == "cpu" else _device_module(kind).get_device_name()

    def synchronize(self, device: str | None = None) -> None:
        if (module := self._accelerator(device)) is not None:
            module.synchronize()

    def empty_cache(self, device: str | None = None) -> None:
        if (module := self._accelerator(device)) is not None:
            module.empty_cache()

    def memory_stats(self, device: str | None = None) -> Mapping[str, Any] | None:
        module = self._accelerator(device)
        return None if module is None else module.memory_stats()

    def max_memory(self, device: str | None = None) -> int | None:
        module = self._accelerator(device)
        return None if module is None else module.max_memory_allocated()

    def total_memory(self, device: str | None = None) -> int | None:
        module = self._accelerator(device)
        return None if module is None else module.mem_get_info()[1]

    def reset_max_memory(self, device: str | None = None) -> None:
        if (module := self._accelerator(device)) is not None:
            module.reset_peak_memory_stats()

    def set_threads(self, count: int) -> None:
        torch.set_num_threads(count)

    def init_on_device(self, device: torch.device | str) -> AbstractContextManager[Any]:
        return torch.device(device)

    def _accelerator(self, device: str | None) -> ModuleType | None:
        """torch's module for the device; None for the cpu, which has nothing to wait for or to account."""
        kind = self.device_type(device)
        return None if kind == "cpu" else _device_module(kind)


def _device_module(kind: str) -> ModuleType:
    return torch.get_device_module(kind)


def _is_present(kind: str) -> bool:
    if kind == "cpu":
        return True
    # torch_npu hangs `torch.npu` in when torch loads it; it is not imported here, where nobody asked for it.
    module = getattr(torch, kind, None)
    return module is not None and module.is_available()


def _forced(kind: str, where: str) -> str:
    """The device type that the user named, or the reason why it cannot be used."""
    if kind not in _PROBING_ORDER:
        raise ConfigError(Fault(where, f"{kind!r} is no device type", allowed=", ".join(_PROBING_ORDER)))
    if kind == "npu" and not hasattr(torch, "npu"):
        _import_torch_npu(where)
    if not _is_present(kind):
        present = ", ".join(name for name in _PROBING_ORDER if _is_present(name))
        raise ConfigError(
            Fault(
                where,
                f"{kind!r} was asked for, but torch {torch.__version__} sees no such device here",
                allowed=f"present: {present}",
                hint=_HINTS[kind],
            )
        )
    return kind


_HINTS = {
    "cuda": "check `nvidia-smi`, and that torch is a CUDA build (torch.version.cuda is not None)",
    "npu": "check `npu-smi info`, and that the CANN toolkit is sourced (ASCEND_HOME_PATH)",
}


def _import_torch_npu(where: str) -> None:
    if importlib.util.find_spec("torch_npu") is None:
        raise ConfigError(
            Fault(where, "'npu' needs torch_npu, which is not installed", hint='pip install "hp-protocols[npu]"')
        )
    try:
        import torch_npu  # noqa: F401
    except Exception as error:
        raise ConfigError(
            Fault(
                where,
                f"'npu' needs torch_npu, whose import fails: {type(error).__name__}: {error}",
                hint="install and source the CANN toolkit (ASCEND_HOME_PATH), or use HP_DEVICE=cpu with "
                "TORCH_DEVICE_BACKEND_AUTOLOAD=0",
            )
        ) from error


def _local_rank() -> int:
    text = os.environ.get("LOCAL_RANK", "0")
    if not text.isdecimal():
        raise ConfigError(Fault("LOCAL_RANK", f"{text!r} is not a rank", allowed="0, 1, 2, …"))
    return int(text)
