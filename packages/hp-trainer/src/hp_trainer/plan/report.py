"""A plan as people and programs read it.

In: a `RunPlan`, the device's memory if it is known, remedies. Out: text, or plain data for JSON.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from hp_trainer.plan.devices import RESERVED_SHARE, DeviceMemory
from hp_trainer.plan.held import Use
from hp_trainer.plan.remedies import Remedy
from hp_trainer.plan.run_plan import Memory, RunPlan

__all__ = ["render", "to_plain"]

_NAMES = {
    Use.PARAMETERS: "parameters",
    Use.GRADIENTS: "gradients",
    Use.OPTIMIZER: "optimizer states",
    Use.GATHERED: "gathered weights",
    Use.REDUCED: "gradients in reduction",
    Use.ACTIVATIONS: "activations",
}


def render(plan: RunPlan, device: DeviceMemory | None = None, remedies: Sequence[Remedy] = ()) -> str:
    """The plan as text."""
    layout, parameters = plan.layout, plan.parameters
    degrees = {name: getattr(layout, name) for name in ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")}
    shown = " × ".join(f"{name} {degree}" for name, degree in degrees.items() if degree > 1) or "one process"
    micro = f" in {layout.micro_batches} micro-batches" if layout.micro_batches > 1 else ""
    least = f", at least {_count(parameters.rank_min)}" if parameters.rank_min != parameters.rank_max else ""
    lines = [
        f"model        {plan.model}",
        f"layout       {shown}  ({layout.world_size} rank{'s' if layout.world_size > 1 else ''})",
        f"batch        {layout.global_rows} rows of {layout.seq_len} = {layout.tokens_per_step:,} tokens per step; "
        f"each rank {layout.local_rows} at once{micro}",
        f"parameters   {_count(parameters.total)} = {_count(parameters.embedding)} embedding "
        f"+ {_count(parameters.non_embedding)}; per rank {_count(parameters.rank_max)}{least}",
        f"FLOPs        {_flops(plan.flops_per_token)} per token, {_flops(plan.flops_per_step)} per step, "
        f"{_flops(plan.flops_per_step // layout.world_size)} per rank and step",
        "",
        *_memory_lines(plan.memory),
        *(f"note         {note}" for note in plan.notes),
    ]
    return "\n".join([*lines, *_verdict(plan, device, remedies)])


def _memory_lines(memory: Memory) -> list[str]:
    lines = [f"memory per rank, at its peak ({memory.peak_at})"]
    for use, name in _NAMES.items():
        lines.append(f"  {name:23}{_size(memory.peak.of([use])):>12}")
    lines.append(f"  {'total':23}{_size(memory.total):>12}")
    states = memory.states
    parts = f"parameters {_size(states.parameters)}, gradients {_size(states.gradients)}"
    where = " (in host memory)" if memory.host else ""
    lines.append(f"states from step to step{where}: {parts}, optimizer {_size(states.optimizer)}")
    return lines


def _verdict(plan: RunPlan, device: DeviceMemory | None, remedies: Sequence[Remedy]) -> list[str]:
    if device is None:
        return []
    total = plan.memory.total
    have = f"{device.name}: {_size(device.usable)} of {_size(device.total)} are for the run"
    have += f" ({RESERVED_SHARE:.0%} for driver, communication and fragmentation)"
    if total <= device.usable:
        return ["", f"fits         {have}"]
    lines = ["", f"does not fit {have}"]
    for index, remedy in enumerate(remedies):
        verdict = "fits" if remedy.total <= device.usable else "not yet"
        lines.append(f"  {'try' if index == 0 else 'and'}  {remedy.option}  → {_size(remedy.total)}, {verdict}")
    if not remedies or remedies[-1].total > device.usable:
        lines.append("  more tensor or context parallelism (--parallelism.…_degree), or shorter rows, may help further")
    return lines


def to_plain(plan: RunPlan, device: DeviceMemory | None = None, remedies: Sequence[Remedy] = ()) -> dict[str, Any]:
    """The plan as data for JSON; sizes in bytes."""
    layout, parameters, memory = plan.layout, plan.parameters, plan.memory
    plain: dict[str, Any] = {
        "model": plan.model,
        "layout": {
            **dataclasses.asdict(layout),
            "global_rows": layout.global_rows,
            "tokens_per_step": layout.tokens_per_step,
        },
        "parameters": {**dataclasses.asdict(parameters), "non_embedding": parameters.non_embedding},
        "flops": {"per_token": plan.flops_per_token, "per_step": plan.flops_per_step},
        "memory_bytes": {
            **{str(use): memory.peak.of([use]) for use in Use},
            "total": memory.total,
            "peak_at": memory.peak_at,
            "states": {name: getattr(memory.states, name) for name in ("parameters", "gradients", "optimizer")},
            "host": memory.host,
        },
        "notes": list(plan.notes),
    }
    if device is not None:
        plain["device"] = {**dataclasses.asdict(device), "usable": device.usable}
        plain["fits"] = memory.total <= device.usable
        plain["remedies"] = [{**dataclasses.asdict(r), "fits": r.total <= device.usable} for r in remedies]
    return plain


def _count(number: int) -> str:
    """`3.01 M`, `26.9 B`."""
    return _scaled(number, ((10**9, " B"), (10**6, " M"), (10**3, " k")))


def _flops(number: int) -> str:
    """`160 GFLOPs`, `41.9 PFLOPs`."""
    units = ((10**18, "E"), (10**15, "P"), (10**12, "T"), (10**9, "G"), (10**6, "M"))
    return _scaled(number, tuple((limit, f" {unit}FLOPs") for limit, unit in units))


def _scaled(number: int, units: Sequence[tuple[int, str]]) -> str:
    """Three digits and the largest unit that fits; all digits where there are more in front of the point."""
    for limit, unit in units:
        if number >= limit:
            return f"{number / limit:.3g}{unit}" if number < 999.5 * limit else f"{number / limit:,.0f}{unit}"
    return str(number)


def _size(size: int) -> str:
    """`12.4 GiB`, `830 MiB`, `12 KiB`."""
    for limit, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= limit:
            return f"{size / limit:.2f} {unit}" if size < 100 * limit else f"{size / limit:.0f} {unit}"
    return f"{size} B"
