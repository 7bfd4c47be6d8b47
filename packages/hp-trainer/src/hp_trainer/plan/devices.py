"""Memory of known devices, and sizes as people write them.

In: a device's name, or a text such as 64GiB. Out: a `DeviceMemory`; a name or text that is not understood is a
ConfigError.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from hp_protocols.errors import ConfigError, Fault, nearest

__all__ = ["DEVICES", "RESERVED_SHARE", "DeviceMemory", "device_memory", "parse_memory"]

GIB = 2**30

DEVICES: dict[str, int] = {
    "A10": 24,
    "A100-40GB": 40,
    "A100-80GB": 80,
    "A800-80GB": 80,
    "Ascend910B2": 64,
    "Ascend910B3": 64,
    "Ascend910B4": 32,
    "B200": 179,
    "GH200-96GB": 95,
    "H100-80GB": 80,
    "H100-NVL": 93,
    "H20-96GB": 95,
    "H200": 140,
    "H800-80GB": 80,
    "L4": 22,
    "L40S": 45,
    "MI300X": 192,
    "MI325X": 256,
    "RTX-4090": 24,
    "V100-16GB": 16,
    "V100-32GB": 32,
}
"""GiB that the driver shows of each, rounded down."""

RESERVED_SHARE = 0.08
"""Of a device's memory, what driver, communication library and fragmentation take; about 6 GiB of 80."""

_UNITS = {"MIB": 2**20, "GIB": 2**30, "TIB": 2**40, "MB": 10**6, "GB": 10**9, "TB": 10**12}


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """A device's memory in bytes, and how it was named. `device_type` is torch's name for its kind."""

    name: str
    total: int
    device_type: str = "cuda"

    @property
    def usable(self) -> int:
        """What a run may plan with."""
        return int(self.total * (1 - RESERVED_SHARE))


def parse_memory(text: str, where: str = "--device-memory") -> DeviceMemory:
    """A size with its unit.

    Raises:
        ConfigError: there is no number, or no unit that is known.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", text)
    unit = _UNITS.get(found.group(2).upper()) if found else None
    if found is None or unit is None or float(found.group(1)) == 0:
        allowed = "a number and MiB, GiB, TiB (1024), MB, GB or TB (1000)"
        raise ConfigError(Fault(where, f"{text!r} is no size", allowed=allowed, hint=f"{where} 64GiB"))
    return DeviceMemory(f"{found.group(1)} {found.group(2)}", int(float(found.group(1)) * unit))


def device_memory(name: str, where: str = "--device") -> DeviceMemory:
    """The memory of a device that is known by name.

    Raises:
        ConfigError: it is not.
    """
    known = {_bare(device): device for device in DEVICES}
    device = known.get(_bare(name))
    if device is None:
        near = nearest(name, DEVICES)
        hint = f"did you mean {near}?" if near else "give its memory: --device-memory 64GiB"
        raise ConfigError(Fault(where, f"the memory of {name!r} is not known", ", ".join(DEVICES), hint))
    return DeviceMemory(device, DEVICES[device] * GIB, "npu" if device.startswith("Ascend") else "cuda")


def _bare(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
