"""The optimizer on the local shards, and clipping by the true global norm (G16).

In: `optimizer_config` or a factory, and partitioned parameters. Out: a torch optimizer; a norm.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hp_compile.passes.parallel.shards import as_dtensor
from hp_compile.tracer.state import shard_info

OptimizerFactory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class OptimizerConfig:
    """The keys of `optimizer_config`."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    grad_clip: float | None = None

    @classmethod
    def read(cls, given: dict[str, Any] | None, factory: OptimizerFactory | None = None) -> OptimizerConfig:
        known = [field.name for field in fields(cls)]
        ignored = sorted(set(given or {}) & set(known) - {"grad_clip"}) if factory is not None else []
        if ignored:
            raise ValueError(
                f"optimizer_config has {', '.join(ignored)}, which optimizer_factory would ignore; set them in the "
                "factory and leave only grad_clip here"
            )
        for key in given or {}:
            if key not in known:
                raise ValueError(f"optimizer_config[{key!r}] is unknown; allowed: {', '.join(known)}")
        config = cls(**(given or {}))
        clip = config.grad_clip
        checks: list[tuple[str, bool, str]] = [
            *((name, _is_number(getattr(config, name)), "a number of at least 0") for name in _AT_LEAST_0),
            ("betas", _are_betas(config.betas), "two numbers, at least 0 and below 1"),
            ("grad_clip", clip is None or (_is_number(clip) and clip > 0), "None or a number above 0"),
        ]
        for name, good, allowed in checks:
            if not good:
                raise ValueError(
                    f"optimizer_config[{name!r}]={getattr(config, name)!r} is not allowed; allowed: {allowed}"
                )
        return config


_AT_LEAST_0 = ("lr", "eps", "weight_decay")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf


def _are_betas(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and len(value) == 2 and all(_is_number(beta) and beta < 1 for beta in value)


def _needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def build_optimizer(
    params: list[nn.Parameter], config: OptimizerConfig, factory: OptimizerFactory | None
) -> torch.optim.Optimizer:
    if factory is not None:
        optimizer = factory(params)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer_factory returned {type(optimizer).__name__}; it must return a torch Optimizer")
        if _needs_closure(optimizer):
            raise ValueError(
                f"optimizer_factory returned {type(optimizer).__name__}, whose step runs the model again through a "
                "closure; a graph trainer steps once per gradient: use an optimizer whose step() needs no closure"
            )
        return optimizer
    # Said explicitly: left to itself torch probes the device, which fails where torch_npu is installed without an NPU.
    # foreach on or off gives the same bits, fused does not.
    on_device = any(parameter.device.type != "cpu" for parameter in params)
    return torch.optim.Adam(
        params,
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
        foreach=on_device,
        fused=False,
    )


@torch.no_grad()
def clip_gradients(params: Iterable[nn.Parameter], max_norm: float) -> torch.Tensor:
    """Scale gradients in place so that their global norm is at most `max_norm`; returns the norm before, 0-d.

    Raises:
        RuntimeError: a plain tensor-parallel shard whose placement nobody declared.
    """
    grads: list[torch.Tensor] = []
    for parameter in params:
        if parameter.grad is None:
            continue
        info = shard_info(parameter)
        if info is not None and not info.placement_known:
            raise RuntimeError(
                f"parameter {info.fqn!r} is a plain tensor-parallel shard of undeclared placement, so the global norm "
                "is unknown; declare it in mesh_context.tp_placements, or use a DTensor"
            )
        grads.append(parameter.grad if info is None else as_dtensor(parameter.grad, info))
    total = _total_norm(grads)
    nn.utils.clip_grads_with_norm_(_Holder.of(grads), max_norm, total)
    return total


def _total_norm(grads: list[torch.Tensor]) -> torch.Tensor:
    meshes: dict[Any, list[torch.Tensor]] = {}
    for grad in grads:
        meshes.setdefault(grad.device_mesh if isinstance(grad, DTensor) else None, []).append(grad)
    norms = []
    for group in meshes.values():
        norm = nn.utils.get_total_norm(group)
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))


class _Holder:
    """torch's clipping takes objects with a `grad`; it scales these in place."""

    def __init__(self, grad: torch.Tensor) -> None:
        self.grad = grad

    @classmethod
    def of(cls, grads: list[torch.Tensor]) -> Any:
        return [cls(grad.to_local() if isinstance(grad, DTensor) else grad) for grad in grads]
