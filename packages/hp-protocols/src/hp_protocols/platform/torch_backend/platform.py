"""torch behind the platform's door: its types as they are, its devices and collectives under our names.

In: torch. Out: `TorchPlatform`, which offers every capability; each noun has its own module beside this one.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import local_map

from hp_protocols.platform.base import Platform
from hp_protocols.platform.capability import Capability

from .collectives import TorchCollectives
from .data_parallel import TorchDataParallel
from .devices import TorchDevices
from .meshes import TorchMeshes
from .modules import TorchModules
from .rng import TorchRandom

__all__ = ["TorchPlatform"]


class TorchPlatform(
    TorchDevices, TorchRandom, TorchCollectives, TorchMeshes, TorchDataParallel, TorchModules, Platform
):
    """The torch backend. Types are torch's own: `get_platform().Linear is torch.nn.Linear`."""

    name: ClassVar[str] = "torch"
    capabilities: ClassVar[frozenset[Capability]] = frozenset(Capability)

    Module = nn.Module
    Parameter = nn.Parameter
    Tensor = torch.Tensor
    Linear = nn.Linear
    Embedding = nn.Embedding
    nn = nn
    F = nn.functional
    ops = torch
    init = nn.init

    DTensor = DTensor
    DeviceMesh = DeviceMesh
    Placement = Placement
    Shard = Shard
    Replicate = Replicate
    Partial = Partial
    init_device_mesh = staticmethod(init_device_mesh)
    distribute_tensor = staticmethod(distribute_tensor)
    local_map = staticmethod(local_map)

    dtype_map: ClassVar[dict[str, torch.dtype]] = {
        "float32": torch.float32,
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
        "float64": torch.float64,
        "int64": torch.int64,
        "int32": torch.int32,
        "int8": torch.int8,
        "uint8": torch.uint8,
        "bool": torch.bool,
    }
