"""The names of mesh axes, and placements keyed by them.

In: nothing. Out: `MeshAxisName`, `Placement` and `NamedPlacement`. "Axis" is a mesh's, "dim" is a tensor's.
Torch-free: `Placement` stands for torch's own class without importing it.
"""

from __future__ import annotations

import sys
from enum import StrEnum
from typing import TYPE_CHECKING, Any

__all__ = ["MeshAxisName", "NamedPlacement", "Placement"]


class MeshAxisName(StrEnum):
    """The axes that a device mesh of this project can have; `str()` is the name in the mesh."""

    DP = "dp"
    DP_REPLICATE = "dp_replicate"
    DP_SHARD = "dp_shard"
    FSDP = "fsdp"
    TP = "tp"
    CP = "cp"
    PP = "pp"
    EP = "ep"
    EFSDP = "efsdp"


if TYPE_CHECKING:
    from torch.distributed.tensor import Placement
else:
    _PLACEMENT_MODULE = "torch.distributed.tensor.placement_types"

    class _PlacementMeta(type):
        def __instancecheck__(cls, instance: Any) -> bool:
            # Where a placement exists, its module has been imported: no need to import it in order to ask.
            module = sys.modules.get(_PLACEMENT_MODULE)
            return module is not None and isinstance(instance, module.Placement)

    class Placement(metaclass=_PlacementMeta):
        """How a tensor lies on one mesh axis: `Shard(dim)`, `Replicate()` or `Partial(op)` of the platform.

        For annotations and `isinstance` only.
        """

        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            raise TypeError("Placement is abstract; use Shard, Replicate or Partial of hp_protocols.platform")


NamedPlacement = dict[MeshAxisName, Placement]
"""A placement per mesh axis; it must name every axis of the mesh it is used on, and may name more."""
