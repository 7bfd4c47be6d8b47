"""One optimizer per model part behind one handle, with state that is keyed by parameter name and so reshards.

In: model parts whose parameters are plain tensors or DTensors. Out: `step`, `zero_grad`, and a flat state dict
(`state.<fqn>.exp_avg`, `param_groups.<fqn>.lr`) that torch.distributed.checkpoint stores for any layout (M30).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, cast

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from hp_components._rank_zero import log
from hp_components.optimizer_groups import DEFAULT_DECAY_KEYWORDS, ParamGroupConfig, group_parameters
from hp_components.optimizer_kinds import Kind, find_kind, name_fault
from hp_components.optimizer_state import changed_hyperparameters, fill_missing_state, restore_rates
from hp_protocols.configurable import Configurable
from hp_protocols.errors import ConfigError, Fault

__all__ = ["OptimizersContainer"]

logger = logging.getLogger(__name__)

_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class OptimizersContainer(Configurable):
    """Steps all model parts together. A tied weight is stepped once; a frozen parameter is left out.

    Hyperparameters are part of the state, but a resumed run follows its own config: where a checkpoint says
    something else, a line names both values. Only the current learning rate is taken from the checkpoint, if the
    base rate is the same. Made with `in_backward`, it is an `OptimizersInBackwardContainer`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        name: str = "AdamW"
        """Optimizer: a class of torch.optim, such as AdamW, Adam, SGD, Adafactor."""

        lr: float = 3e-4
        """Learning rate at full height; the schedule scales it."""

        betas: tuple[float, float] = (0.9, 0.95)
        """Decay rates of the running means of the gradient and of its square. Given to an optimizer that takes no
        betas, it is refused; its default does not reach one. (So with eps and weight_decay.)"""

        eps: float = 1e-8
        """Added to the denominator."""

        weight_decay: float = 0.1
        """Weight decay of the parameters that decay."""

        kwargs: dict[str, Any] = field(default_factory=dict)
        """Further arguments of the optimizer, by its own names, such as {momentum: 0.9} for SGD."""

        foreach: bool | None = None
        """Step many tensors per kernel launch. None: on accelerators without a fused kernel."""

        fused: bool | None = None
        """One kernel for the whole step. None: on cuda, where the optimizer has one."""

        in_backward: bool = False
        """Step each parameter inside the backward pass, as soon as its gradient is there, and free the gradient.
        Without clipping (training.max_norm=inf)."""

        decay_keywords: tuple[str, ...] = DEFAULT_DECAY_KEYWORDS
        """A parameter whose name contains one of these (in any case) gets no weight decay."""

        param_groups: list[ParamGroupConfig] = field(default_factory=list)
        """Parameters with hyperparameters of their own, by pattern; the first pattern that matches a name has it."""

        def faults(self, path: str) -> list[Fault]:
            """Values that no optimizer could have, or that the named one does not take."""
            faults = [] if (wrong := name_fault(self.name, f"{path}.name")) is None else [wrong]
            faults += _range_faults(self, path)
            if self.foreach and self.fused:
                faults.append(Fault(f"{path}.foreach", "given together with fused", hint="choose one of them"))
            if self.foreach and self.in_backward:
                problem = "given together with in_backward, which steps one tensor at a time"
                faults.append(Fault(f"{path}.foreach", problem, hint="drop one of them"))
            if "" in self.decay_keywords:
                faults.append(Fault(f"{path}.decay_keywords", "an empty keyword would match every parameter"))
            return faults if wrong else faults + _kind_faults(self, find_kind(self.name), path, sound=not faults)

    def __new__(cls, config: Config | None = None, **kwargs: Any) -> Self:
        # Without a config where a copy is made.
        if cls is OptimizersContainer and config is not None and config.in_backward:
            from hp_components.optimizer_in_backward import OptimizersInBackwardContainer

            cls = cast(type[Self], OptimizersInBackwardContainer)
        return super().__new__(cls)

    def __init__(self, config: Config, *, model_parts: Sequence[nn.Module]) -> None:
        faults = config.faults("optimizer")
        for index, group in enumerate(config.param_groups):
            faults += group.faults(f"optimizer.param_groups.{index}")
        if config.in_backward and not self.steps_in_backward:
            faults.append(Fault("optimizer.in_backward", f"{type(self).__name__} steps after the backward pass"))
        if faults:
            raise ConfigError(faults)
        self.config = config
        self.kind = find_kind(config.name)
        grouped = group_parameters(model_parts, config, self.kind)
        self.model_parts = [model for model, _ in grouped]
        self._by_part = [self._make(groups) for _, groups in grouped]

    @property
    def steps_in_backward(self) -> bool:
        """Whether gradients are used up within backward, so that they cannot be clipped or looked at after it."""
        return False

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """All of torch's optimizers, part after part."""
        return [optimizer for part in self._by_part for optimizer in part]

    def __iter__(self) -> Iterator[torch.optim.Optimizer]:
        return iter(self.optimizers)

    def __len__(self) -> int:
        return len(self.optimizers)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all optimizers, in order; the first is that of no pattern, where there is one."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def begin_backward(self, *, last: bool) -> None:
        """Called before each micro-batch's backward pass; `last`: the step's last one."""

    def step(self) -> None:
        """Update every parameter that has a gradient."""
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, or set them to zero."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """State and hyperparameters under flat keys; the tensors are the live ones, not copies."""
        flat: dict[str, Any] = {}
        for model, optimizers in zip(self.model_parts, self._by_part, strict=True):
            part = _flat_state(model, optimizers)
            if twice := flat.keys() & part.keys():
                raise ValueError(f"two model parts have the same parameter names: {sorted(twice)[:3]}")
            flat.update(part)
        return flat

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a saved state; hyperparameters stay this run's (see the class).

        Raises:
            KeyError: the state of a parameter is missing; the name says which.
        """
        changes: dict[str, tuple[str, Any, Any]] = {}
        for model, optimizers in zip(self.model_parts, self._by_part, strict=True):
            own = _flat_state(model, optimizers)
            merged = {key: state_dict[key] if key.startswith("state.") else value for key, value in own.items()}
            changes |= {str(change): change for change in changed_hyperparameters(own, state_dict)}
            set_optimizer_state_dict(model, optimizers, merged, options=_FLAT)
            for optimizer in optimizers:
                restore_rates(model, optimizer, state_dict)
        for name, saved, now in changes.values():
            log(
                logger,
                logging.WARNING,
                "optimizer: %s was %s when the checkpoint was saved and is %s now; this run goes on with %s",
                name,
                saved,
                now,
                now,
            )

    def _make(self, groups: list[dict[str, Any]]) -> list[torch.optim.Optimizer]:
        """The optimizers of one model part."""
        return [self._optimizer(groups)]

    def _optimizer(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        arguments = _arguments(self.config, self.kind)
        arguments |= _kernels(self.config, self.kind, groups[0]["params"][0].device.type)
        optimizer: torch.optim.Optimizer = self.kind.cls(groups, **arguments)
        return optimizer


def _range_faults(config: OptimizersContainer.Config, path: str) -> list[Fault]:
    faults = []
    for name in ("lr", "weight_decay"):
        value = getattr(config, name)
        if not 0.0 <= value < math.inf:
            faults.append(Fault(f"{path}.{name}", f"{value} is out of range", allowed="0 or more"))
    if not 0.0 < config.eps < math.inf:
        faults.append(Fault(f"{path}.eps", f"{config.eps} is out of range", allowed="above 0"))
    if len(config.betas) != 2 or not all(0.0 <= beta < 1.0 for beta in config.betas):
        faults.append(Fault(f"{path}.betas", f"{config.betas} is out of range", allowed="two of 0 ≤ beta < 1"))
    return faults


def _kind_faults(config: OptimizersContainer.Config, kind: Kind, path: str, *, sound: bool) -> list[Fault]:
    """What the named optimizer does not take; `sound`: all values are in range, so that it can be asked itself."""
    found: list[Fault | None] = []
    defaults = OptimizersContainer.Config()
    for name in ("betas", "eps", "weight_decay"):
        if getattr(config, name) != getattr(defaults, name):
            found.append(kind.field_fault(name, f"{path}.{name}"))
    for name in ("foreach", "fused"):
        if getattr(config, name):
            found.append(kind.field_fault(name, f"{path}.{name}"))
    found += kind.kwargs_faults(config.kwargs, f"{path}.kwargs")
    groups: list[tuple[str, dict[str, Any]]] = []
    for index, group in enumerate(config.param_groups):
        where = f"{path}.param_groups.{index}"
        for name in ("betas", "eps", "weight_decay"):
            if getattr(group, name) is not None:
                found.append(kind.field_fault(name, f"{where}.{name}"))
        found += kind.kwargs_faults(group.kwargs, f"{where}.kwargs")
        own = {name: getattr(group, name) for name in ("betas", "eps") if getattr(group, name) is not None}
        groups.append((where, own | group.kwargs))
    faults = [fault for fault in found if fault is not None]
    if faults or not sound:
        return faults
    arguments = _arguments(config, kind)
    for where, own in [(f"{path}.kwargs", {}), *groups]:
        merged = {**arguments, **{name: kind.read({name: value})[name] for name, value in own.items()}}
        if (problem := kind.refusal(merged)) is not None:
            return [Fault(where, f"{kind.name} says: {problem}")]
        if merged.get("momentum") and merged.get("dampening"):
            problem = "dampening with momentum cannot be resumed exactly: its first step follows another rule"
            return [Fault(where, problem, allowed="dampening=0")]
    return []


def _arguments(config: OptimizersContainer.Config, kind: Kind) -> dict[str, Any]:
    """What the optimizer is made with, its kernels apart."""
    fields = {"lr": config.lr, "betas": config.betas, "eps": config.eps, "weight_decay": config.weight_decay}
    return {name: value for name, value in fields.items() if kind.takes_field(name)} | kind.read(config.kwargs)


def _kernels(config: OptimizersContainer.Config, kind: Kind, device_type: str) -> dict[str, bool]:
    """foreach and fused, both decided: torch_npu replaces torch's own choice by one that asks for an NPU."""
    fused = config.fused
    if fused is None:
        fused = kind.takes_field("fused") and device_type == "cuda" and not config.foreach
    foreach = config.foreach
    if foreach is None:
        foreach = device_type != "cpu" and not fused and not config.in_backward
    return {name: value for name, value in (("foreach", foreach), ("fused", fused)) if kind.takes_field(name)}


def _flat_state(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict[str, Any]:
    for optimizer in optimizers:
        fill_missing_state(optimizer)
    return dict(get_optimizer_state_dict(model, optimizers, options=_FLAT))
