"""Optimizer steps inside the backward pass: a parameter is updated as soon as its gradient is there.

In: what an `OptimizersContainer` takes. Out: the same updates, bit for bit, while only the gradients that backward is
at work on exist; for models whose gradients would not fit beside their weights.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hp_components._rank_zero import log
from hp_components.optimizer import OptimizersContainer
from hp_protocols.distributed import canonical_named_parameters
from hp_protocols.errors import Fault

__all__ = ["OptimizersInBackwardContainer"]

logger = logging.getLogger(__name__)


class OptimizersInBackwardContainer(OptimizersContainer):
    """One optimizer per parameter, stepped by a hook; `step` and `zero_grad` only tidy up. The state is the ordinary
    one: either container loads what the other has saved.

    Works on plain and on sharded parameters (under FSDP2 the hook comes when a unit's gradients are reduced).
    What needs all gradients at once cannot be had: clipping, a gradient norm, skipping an update that is not finite.
    Where a step has several micro-batches, gradients are summed up in memory and only the last pass frees them.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        in_backward: bool = True
        """Always: this class does nothing else."""

        def faults(self, path: str) -> list[Fault]:
            """As for every optimizer."""
            faults = super().faults(path)
            if not self.in_backward:
                problem = "OptimizersInBackwardContainer steps in backward"
                faults.append(Fault(f"{path}.in_backward", problem, hint="use OptimizersContainer"))
            return faults

    def __init__(self, config: OptimizersContainer.Config, *, model_parts: Sequence[nn.Module]) -> None:
        super().__init__(config, model_parts=model_parts)
        self._last = True
        self._told = False
        self._stepped: set[nn.Parameter] = set()
        self._owners = {group["params"][0]: o for o in self.optimizers for group in o.param_groups}
        for parameter in self._owners:
            parameter.register_post_accumulate_grad_hook(self._on_gradient)

    @property
    def steps_in_backward(self) -> bool:
        return True

    def begin_backward(self, *, last: bool) -> None:
        """Called before each micro-batch's backward pass; only the step's `last` one updates parameters."""
        if not last and not self._told:
            self._told = True
            message = "optimizer.in_backward with several micro-batches per step: gradients stay in memory between them"
            log(logger, logging.WARNING, message)
        self._last = last

    def step(self) -> None:
        """Update the parameters that got gradients from earlier micro-batches only."""
        for parameter, optimizer in self._owners.items():
            if parameter.grad is not None:
                optimizer.step()
                parameter.grad = None
        self._stepped.clear()

    def _make(self, groups: list[dict[str, Any]]) -> list[torch.optim.Optimizer]:
        return [self._optimizer([{**group, "params": [p]}]) for group in groups for p in group["params"]]

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        if not self._last:
            return
        assert isinstance(parameter, nn.Parameter)
        if parameter in self._stepped:
            raise RuntimeError(
                f"the gradient of {self._name(parameter)} came in two parts within one step, and the first one is used "
                "up already; set optimizer.in_backward=False for this model (or call step() after each backward)"
            )
        self._stepped.add(parameter)
        self._owners[parameter].step()
        parameter.grad = None

    def _name(self, parameter: nn.Parameter) -> str:
        names = (name for part in self.model_parts for name, p in canonical_named_parameters(part) if p is parameter)
        return next(names, "a parameter")
