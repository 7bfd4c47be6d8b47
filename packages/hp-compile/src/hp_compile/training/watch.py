"""Notices what changed on the model since capture: a graph never runs for a model that it was not captured from (G6).

In: a model. Out: per step, a key of what may change with a recapture, or an error for what may not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hp_compile import _torch_compat as compat
from hp_compile.tracer.state import scan_state


class ModelWatch:
    """Remembers structure and parameters by identity; reading them each step is a few dictionary look-ups."""

    def __init__(self, model: nn.Module) -> None:
        self.slots = scan_state(model)
        self._by_name = {slot.fqn: slot.tensor for slot in self.slots if slot.is_param}
        self.params = [slot.tensor for slot in self.slots if slot.is_param]
        self._names = {id(module): name for name, module in model.named_modules()}
        self._modules = [
            (module, *compat.tensor_slots(module), compat.child_slots(module), self._sizes(module))
            for module in model.modules()
        ]
        self._places = [
            (compat.tensor_slots(module)[0], attribute, slot)
            for slot in self.slots
            if slot.is_param
            for module, attribute in slot.owners
        ]
        self._buffers = [
            (compat.tensor_slots(slot.owners[0][0])[1], slot.owners[0][1]) for slot in self.slots if not slot.is_param
        ]

    @staticmethod
    def _sizes(module: nn.Module) -> tuple[int, int, int]:
        params, buffers = compat.tensor_slots(module)
        return len(params), len(buffers), len(compat.child_slots(module))

    def key(self) -> tuple[Any, ...]:
        """Training flags, requires_grad, shapes and dtypes, hooks: a change of them is a new graph.

        Raises:
            RuntimeError: a parameter, buffer or submodule was added, removed or replaced.
        """
        for module, params, buffers, children, sizes in self._modules:
            if (len(params), len(buffers), len(children)) != sizes:
                raise self._changed(
                    f"module {self._names[id(module)] or '(root)'!r} has {len(params)} parameters, {len(buffers)} "
                    f"buffers and {len(children)} submodules, not {sizes[0]}, {sizes[1]} and {sizes[2]}"
                )
        for own, attribute, slot in self._places:
            if own.get(attribute) is not slot.tensor:
                raise self._changed(f"parameter {slot.fqn!r} was replaced by another object")
        return (
            tuple(module.training for module, *_ in self._modules),
            tuple((parameter.requires_grad, parameter.shape, parameter.dtype) for parameter in self.params),
            tuple((buffer.shape, buffer.dtype) for buffer in self.buffers()),
            tuple(len(module._forward_hooks) + len(module._forward_pre_hooks) for module, *_ in self._modules),
        )

    @property
    def by_name(self) -> dict[str, torch.Tensor]:
        return self._by_name

    def rebind(self, fqn: str, value: torch.Tensor) -> None:
        """Forward assigned a new tensor to a buffer, and so does the step."""
        slot = next(slot for slot in self.slots if slot.fqn == fqn)
        for module, attribute in slot.owners:
            compat.tensor_slots(module)[1][attribute] = value

    def buffers(self) -> list[torch.Tensor]:
        return [own[attribute] for own, attribute in self._buffers]

    @staticmethod
    def _changed(what: str) -> RuntimeError:
        return RuntimeError(
            f"the model changed since it was compiled: {what}. Change the model before the first step, or build a new "
            "GraphTrainer from it"
        )
