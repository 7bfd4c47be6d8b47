"""FSDP2 and its replicating sibling on one unit (a module, or modules that communicate together).

In: a unit, a mesh, dtypes. Out: `TorchDataParallel`, the data-parallel half of the platform. Which modules are
units is decided in `hp_protocols.distributed`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from hp_protocols.platform.base import Platform

from . import _torch_compat

__all__ = ["TorchDataParallel"]


class TorchDataParallel(Platform):
    """`torch.distributed.fsdp.fully_shard`, and `replicate`, which torch has not made public yet.

    FSDP2 is imported where it is used: it doubles the time that `import torch` takes.
    """

    def is_data_parallel(self, module: nn.Module) -> bool:
        from torch.distributed.fsdp import FSDPModule

        return isinstance(module, FSDPModule)

    def shard_unit(
        self,
        unit: Sequence[nn.Module],
        *,
        mesh: DeviceMesh,
        param_dtype: torch.dtype | None,
        reduce_dtype: torch.dtype | None,
        cast_forward_inputs: bool,
        reshard_after_forward: bool | None,
        cpu_offload: bool,
        sum_gradients: bool,
    ) -> None:
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

        options: dict[str, Any] = {
            "mesh": mesh,
            "reshard_after_forward": reshard_after_forward,
            "mp_policy": MixedPrecisionPolicy(param_dtype, reduce_dtype, cast_forward_inputs=cast_forward_inputs),
            "offload_policy": CPUOffloadPolicy() if cpu_offload else OffloadPolicy(),
        }
        fully_shard(_one_or_list(unit), **options)
        if sum_gradients:
            _sum_gradients(unit)

    def replicate_unit(
        self,
        unit: Sequence[nn.Module],
        *,
        mesh: DeviceMesh,
        param_dtype: torch.dtype | None,
        reduce_dtype: torch.dtype | None,
        cast_forward_inputs: bool,
        sum_gradients: bool,
    ) -> None:
        from torch.distributed.fsdp import MixedPrecisionPolicy

        policy = MixedPrecisionPolicy(param_dtype, reduce_dtype, cast_forward_inputs=cast_forward_inputs)
        _torch_compat.replicate(_one_or_list(unit), mesh=mesh, mp_policy=policy)
        if sum_gradients:
            _sum_gradients(unit)


def _one_or_list(unit: Sequence[nn.Module]) -> Any:
    # A list of one would be a group of one; fully_shard answers both alike, but names a single module better.
    return unit[0] if len(unit) == 1 else list(unit)


def _sum_gradients(unit: Sequence[nn.Module]) -> None:
    """Sum instead of mean: the divisor is 1, and the collective itself is a plain sum (gloo has no other)."""
    from torch.distributed.fsdp import FSDPModule

    for module in unit:
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
