"""What a run would take, before there is one: layout, parameters, FLOPs, memory per rank. No accelerator needed.

In: a checked `HyperTrainer.Config` and a number of processes. Out: `plan_run` gives a `RunPlan`, `render` its text,
`advise` what to change where it does not fit a device.
"""

from __future__ import annotations

from hp_trainer.plan.device_memory import DEVICES, DeviceMemory, device_memory, parse_memory
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
