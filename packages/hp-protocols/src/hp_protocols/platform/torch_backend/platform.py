"""torch behind the platform's door: its types as they are, its devices and collectives under our names.

In: torch. Out: `TorchPlatform`, which offers every capability; each noun has its own module beside this one.
"""

from __future__ import annotations

import importlib
from typing import Any, ClassVar

import torch
from torch import nn

from hp_protocols.platform.capability import Capability

from .collectives import TorchCollectives
from .data_parallel import TorchDataParallel
from .devices import TorchDevices
from .meshes import TorchMeshes
from .modules import TorchModules
from .profiling import TorchProfiling
from .rng import TorchRandom

__all__ = ["TorchPlatform"]


# Imported on first use: distributed tensors double the time that `import torch` takes.
_DISTRIBUTED_TENSORS = {
    "DTensor": "torch.distributed.tensor",
    "DeviceMesh": "torch.distributed.device_mesh",
    "Placement": "torch.distributed.tensor",
    "Shard": "torch.distributed.tensor",
    "Replicate": "torch.distributed.tensor",
    "Partial": "torch.distributed.tensor",
    "init_device_mesh": "torch.distributed.device_mesh",
    "distribute_tensor": "torch.distributed.tensor",
    "local_map": "torch.distributed.tensor.experimental",
}


class TorchPlatform(
    TorchDevices, TorchRandom, TorchCollectives, TorchMeshes, TorchDataParallel, TorchModules, TorchProfiling
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

    def __getattr__(self, attribute: str) -> Any:
        if attribute not in _DISTRIBUTED_TENSORS:
            return super().__getattr__(attribute)
        value = getattr(importlib.import_module(_DISTRIBUTED_TENSORS[attribute]), attribute)
        self.__dict__[attribute] = value
        return value
