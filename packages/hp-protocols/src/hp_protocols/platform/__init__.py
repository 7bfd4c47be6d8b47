"""The backend behind one door: types, devices, random numbers, process groups, distributed tensors.

In: the environment (HYPER_PARALLEL_PLATFORM, HP_DEVICE). Out: `get_platform()`, and the lazy namespaces `nn`,
`F`, `ops` (the backend's tensor functions), `init`. Importing this package imports no backend.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .capability import Capability, CapabilityError
from .namespace import Namespace
from .selection import PLATFORM_VARIABLE, get_platform, platform_name

if TYPE_CHECKING:
    import torch as ops
    import torch.nn.functional as F
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
    from torch.nn import Embedding, Linear, Module, Parameter, init

    from .base import Platform

    dtype_map: dict[str, ops.dtype]
    TORCH_DTYPE_MAP: dict[str, ops.dtype]
else:
    nn = Namespace("nn")
    F = Namespace("F")
    ops = Namespace("ops")
    init = Namespace("init")

__all__ = [
    "PLATFORM_VARIABLE",
    "TORCH_DTYPE_MAP",
    "Capability",
    "CapabilityError",
    "DTensor",
    "DeviceMesh",
    "Embedding",
    "F",
    "Linear",
    "Module",
    "Parameter",
    "Partial",
    "Placement",
    "Platform",
    "Replicate",
    "Shard",
    "Tensor",
    "dtype_map",
    "get_platform",
    "init",
    "nn",
    "ops",
    "platform_name",
]

# Served by the platform on first use; importing one of these names loads the backend.
_FROM_PLATFORM = {
    "DTensor": "DTensor",
    "DeviceMesh": "DeviceMesh",
    "Embedding": "Embedding",
    "Linear": "Linear",
    "Module": "Module",
    "Parameter": "Parameter",
    "Partial": "Partial",
    "Placement": "Placement",
    "Replicate": "Replicate",
    "Shard": "Shard",
    "TORCH_DTYPE_MAP": "dtype_map",
    "Tensor": "Tensor",
    "dtype_map": "dtype_map",
}


def __getattr__(name: str) -> Any:
    if name == "Platform":
        from .base import Platform

        return Platform
    if name in _FROM_PLATFORM:
        return getattr(get_platform(), _FROM_PLATFORM[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
