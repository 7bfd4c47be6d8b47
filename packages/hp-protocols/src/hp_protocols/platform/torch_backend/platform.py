"""torch behind the platform's door: its types as they are, its devices and collectives under our names.

In: torch. Out: `TorchPlatform`, which offers every capability.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import local_map

from ..base import Platform
from ..capability import Capability
from .collectives import TorchCollectives
from .devices import TorchDevices
from .random import TorchRandom

__all__ = ["TorchPlatform"]


class TorchPlatform(TorchDevices, TorchRandom, TorchCollectives, Platform):
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

    def clip_grad_norm_(
        self,
        parameters: Iterable[torch.Tensor],
        max_norm: float,
        *,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        from ...distributed.clip_grad import clip_grad_norm_

        return clip_grad_norm_(parameters, max_norm, error_if_nonfinite=error_if_nonfinite, foreach=foreach)

    def checkpoint_wrapper(self, module: nn.Module, **options: Any) -> nn.Module:
        from ..._torch_compat import checkpoint_wrapper

        return checkpoint_wrapper(module, **options)
