"""Notices what changed on the model since capture: a graph never runs for a model that it was not captured from (G6).

In: a model. Out: per step, a key of what may change with a recapture, or an error for what may not.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import nn

from hp_compile import _torch_compat as compat
from hp_compile.tracer.state import scan_state

# What forward may branch on or compute with. Lists and other objects are not looked into.
_PLAIN = (bool, int, float, complex, str, type(None))
_WATCHED = (*_PLAIN, torch.Tensor, types.FunctionType, types.BuiltinFunctionType, types.MethodType)


def _value(value: Any) -> Any:
    return value if type(value) in _PLAIN else id(value)


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
        self._children = [
            (children, name, child) for _, _, _, children, _ in self._modules for name, child in children.items()
        ]
        self._hooks = [table for module in model.modules() for table in compat.hook_tables(module)]
        self._hooks += compat.global_hook_tables()
        self._attributes: list[tuple[dict[str, Any], str]] = []
        self._attribute_counts: list[int] = []
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
        """What forward may read besides its inputs: a change of it is a new graph.

        Training flags, requires_grad, shapes and dtypes, hooks, and plain values, functions and tensors in attributes.

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
        for children, name, child in self._children:
            if children.get(name) is not child:
                raise self._changed(f"submodule {self._names[id(child)]!r} was replaced by another object")
        found = self.buffers()
        if any(buffer is None for buffer in found):
            lost = [slot.fqn for slot in self.slots if not slot.is_param]
            raise self._changed(f"buffer {lost[[b is None for b in found].index(True)]!r} was set to None")
        return (
            tuple(module.training for module, *_ in self._modules),
            tuple((parameter.requires_grad, parameter.shape, parameter.dtype) for parameter in self.params),
            tuple((buffer.shape, buffer.dtype) for buffer in found),
            tuple([tuple(table) for table in self._hooks if table]),
            tuple([tuple(table) for tensor in self.params for table in compat.tensor_hook_tables(tensor) if table]),
            self._attribute_values(),
        )

    def _attribute_values(self) -> tuple[Any, ...]:
        counts = [len(module.__dict__) for module, *_ in self._modules]
        if counts != self._attribute_counts:
            self._attribute_counts = counts
            self._attributes = [
                (module.__dict__, name)
                for module, *_ in self._modules
                for name, value in module.__dict__.items()
                if not compat.is_torchs_own(name) and isinstance(value, _WATCHED)
            ]
        return tuple([_value(own.get(name)) for own, name in self._attributes])

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
