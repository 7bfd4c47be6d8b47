"""What a module declares about its layout on a mesh, by the names of mesh axes.

In: placements per axis for states, inputs and outputs. Out: `ShardingConfig`, which `Module.parallelize(mesh)`
carries out, and `resolve_placements`, which puts named placements in a mesh's axis order. Torch-free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .types import MeshAxisName, NamedPlacement, Placement

__all__ = ["LocalMapConfig", "OutputShardings", "ShardingConfig", "resolve_placements"]

OutputShardings = NamedPlacement | tuple[Any, ...] | dict[str, Any] | None
"""The layout of a forward's output, as a prefix of the output's structure.

A `NamedPlacement` holds for every tensor below it; a tuple or a dict goes one level down; None leaves it alone.
So `{TP: Shard(1)}` fits one tensor as well as a tuple of tensors, and `({TP: Shard(1)}, None)` only the first of two.
"""


@dataclass(kw_only=True, slots=True)
class LocalMapConfig:
    """The forward computes on local tensors: DTensors are unwrapped before it and results wrapped after it.

    Input layouts are those of `ShardingConfig.in_dst_shardings`, output layouts those of `out_src_shardings`.

    Attributes:
        in_grad_placements: the layout of each input's gradient, in the order of forward's parameters; None, or no
            entry, means the layout of the input. A replicated input whose ranks compute different parts of the
            gradient needs `Partial` here.
    """

    in_grad_placements: tuple[NamedPlacement | None, ...] = ()


@dataclass(kw_only=True, slots=True)
class ShardingConfig:
    """The layout of a module's states, inputs and outputs. Every placement is keyed by mesh axis name.

    Inputs are keyed by the names of forward's parameters; an entry for `*args` holds for each of its tensors, and a
    name that forward takes through `**kwargs` may be declared too.

    Attributes:
        state_shardings: parameters and buffers. Each state of the module needs an entry; an entry for a state that is
            registered as None (a bias that is off) is ignored.
        in_src_shardings: how a plain input tensor lies on the mesh; it becomes a DTensor of that layout.
        in_dst_shardings: the layout that an input is brought to before forward.
        out_src_shardings: how a plain output tensor lies on the mesh (needed with `local_map`).
        out_dst_shardings: the layout that an output is brought to after forward.
        local_map: if set, forward sees local tensors.
    """

    state_shardings: dict[str, NamedPlacement] = field(default_factory=dict)
    in_src_shardings: dict[str, NamedPlacement] | None = None
    in_dst_shardings: dict[str, NamedPlacement] | None = None
    out_src_shardings: OutputShardings = None
    out_dst_shardings: OutputShardings = None
    local_map: LocalMapConfig | None = None


def resolve_placements(named: NamedPlacement, mesh_axis_names: Sequence[str] | None) -> tuple[Placement, ...]:
    """The placements in the order of the mesh's axes.

    Axes that are declared but not in the mesh are ignored, so that one declaration serves many meshes.

    Raises:
        ValueError: the mesh has no names, or an axis without a declared placement, or a key of `named` is not a
            `MeshAxisName`.
    """
    if not mesh_axis_names:
        raise ValueError(
            "the device mesh has no axis names; make it with mesh_dim_names=(…), each one of " + ", ".join(MeshAxisName)
        )
    known = {str(axis) for axis in MeshAxisName}
    if strangers := [key for key in named if not isinstance(key, str) or str(key) not in known]:
        raise ValueError(f"{strangers[0]!r} is no MeshAxisName; allowed: {', '.join(MeshAxisName)}")
    by_name = {str(axis): placement for axis, placement in named.items()}
    if missing := [axis for axis in mesh_axis_names if axis not in by_name]:
        raise ValueError(
            f"no placement is declared for mesh axis {', '.join(map(repr, missing))}; "
            f"declared: {', '.join(sorted(by_name)) or 'none'}; the mesh has: {', '.join(mesh_axis_names)}"
        )
    return tuple(by_name[axis] for axis in mesh_axis_names)
