"""What a run would take, before there is one: layout, parameters, FLOPs, memory per rank. No accelerator needed.

In: a checked `HyperTrainer.Config` and a number of processes. Out: `plan_run` gives a `RunPlan`, `render` its text,
`advise` what to change where it does not fit a device. Importing this package does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hp_trainer.plan.devices import DEVICES, DeviceMemory, device_memory, parse_memory
    from hp_trainer.plan.held import STATES, Held, Use
    from hp_trainer.plan.remedies import Remedy, advise
    from hp_trainer.plan.report import render, to_plain
    from hp_trainer.plan.run_plan import Layout, Memory, Parameters, RunPlan, plan_run

__all__ = [
    "DEVICES",
    "STATES",
    "DeviceMemory",
    "Held",
    "Layout",
    "Memory",
    "Parameters",
    "Remedy",
    "RunPlan",
    "Use",
    "advise",
    "device_memory",
    "parse_memory",
    "plan_run",
    "render",
    "to_plain",
]

_HOME = {
    **dict.fromkeys(("DEVICES", "DeviceMemory", "device_memory", "parse_memory"), "devices"),
    **dict.fromkeys(("STATES", "Held", "Use"), "held"),
    **dict.fromkeys(("Remedy", "advise"), "remedies"),
    **dict.fromkeys(("render", "to_plain"), "report"),
    **dict.fromkeys(("Layout", "Memory", "Parameters", "RunPlan", "plan_run"), "run_plan"),
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
