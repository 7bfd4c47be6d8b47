"""What a trainer knows before anything is communicated or cut: layout of the mesh, units, precision.

In: a live model, a config, maybe a plan and a mesh context. Out: a `Start`, or the error that stops all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from hp_compile.mesh import MeshAxis, MeshLayout, axes_of, layout_of
from hp_compile.pass_config import PassConfig
from hp_compile.pass_plan import PassPlan
from hp_compile.passes.parallel.shards import tensor_parallel_axes
from hp_compile.passes.parallel.units import Unit, capture_precision, resolve_units
from hp_compile.tracer.capture import CapturePrecision
from hp_compile.tracer.checks import refuse_what_capture_would_skip
from hp_compile.tracer.state import StateSlot, scan_state, shard_info


@dataclass(frozen=True)
class Start:
    """Attributes:
    layout: of the data-parallel mesh; None without one.
    others: axes besides it whose ranks run the same steps.
    units, precision: what is gathered and reduced together, and in which dtypes forward computes.
    plans: what all ranks of the data-parallel group must have alike, by subject.
    """

    layout: MeshLayout | None
    others: list[MeshAxis]
    units: list[Unit]
    precision: CapturePrecision
    plans: dict[str, str]


def start_of(
    model: nn.Module, config: PassConfig, plan: PassPlan | None, context: Any, *, sync_module_states: bool
) -> Start:
    """Raises what is wrong with the model, the plan or the mesh; nothing has been communicated or changed then."""
    refuse_what_capture_would_skip(model)
    if any(shard_info(parameter) is not None for parameter in model.parameters()):
        raise RuntimeError(
            "the model is already partitioned by another GraphTrainer; keep using that one, or build a fresh model"
        )
    units = resolve_units(model, plan, reshard=config.fsdp_reshard_after_forward)
    layout = layout_of(config, context)
    known = axes_of(layout.mesh) if layout is not None and layout.mesh is not None else []
    settings = {**vars(layout.config if layout is not None else config), "sync_module_states": sync_module_states}
    slots = [slot for slot in scan_state(model) if slot.is_param]
    return Start(
        layout=layout,
        others=tensor_parallel_axes(model, context, known),
        units=units,
        precision=capture_precision(model, units, config),
        plans={
            "settings": "\n".join(f"{name}={value!r}" for name, value in settings.items()),
            "mesh sizes": "" if layout is None else f"{layout.names} of {layout.shape}",
            "units": "\n".join(f"unit {unit.fqn or '(root)'!r} of {', '.join(unit.params)}" for unit in units),
            "parameters": "\n".join(map(_described, slots)),
        },
    )


def _described(slot: StateSlot) -> str:
    where = " on meta" if slot.tensor.is_meta else ""
    return f"parameter {slot.fqn!r} {tuple(slot.full_shape)} {str(slot.tensor.dtype).removeprefix('torch.')}{where}"
