"""What a graph was captured for: structure, shapes, types, strides and devices of the inputs (G4, G7).

In: the pytrees `(input, label)`. Out: their leaves, and a key that two calls share only if one graph serves both.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from hp_compile import _torch_compat as compat

_PRIMITIVES = (int, float, bool, str, type(None))


@dataclass(frozen=True)
class FlatInputs:
    """The leaves of `(input, label)`; `key` describes every leaf, primitives by value."""

    leaves: tuple[Any, ...]
    spec: Any
    key: tuple[Any, ...]

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]

    def without_data(self) -> FlatInputs:
        """What a cache keeps: it must not hold on to a batch."""
        return replace(self, leaves=())

    def matches(self, spec: Any, key: tuple[Any, ...]) -> bool:
        return self.key == key and self.spec == spec


def flatten_inputs(input: Any, label: Any) -> FlatInputs:
    """Flatten and check the leaves.

    Raises:
        TypeError: a leaf is neither a tensor nor a primitive; names its path and the remedy.
        ValueError: a tensor leaf asks for a gradient, which the graph would not give it.
    """
    leaves, spec = compat.pytree.tree_flatten((input, label))
    key = []
    for at, leaf in enumerate(leaves):
        if type(leaf) is torch.Tensor:
            if leaf.requires_grad:
                raise ValueError(
                    f"{leaf_path(input, label, at)} requires a gradient, and a captured step gives gradients to the "
                    "parameters only; pass it detached, or register it as a parameter of the model"
                )
            key.append(tensor_key(leaf))
        elif type(leaf) in _PRIMITIVES:
            # repr keeps 0.0 and -0.0 apart and makes nan equal to itself.
            key.append((type(leaf), repr(leaf)))
        elif isinstance(leaf, torch.Tensor) and type(leaf) is torch.nn.Parameter:
            raise ValueError(f"{leaf_path(input, label, at)} is a parameter; pass it detached, or put it in the model")
        else:
            raise TypeError(
                f"{leaf_path(input, label, at)} is a {type(leaf).__name__}; leaves of input and label may be Tensor, "
                "int, float, bool, str or None. Close over the object in train_fn, or register its class as a pytree "
                "node (GraphTrainer.set_pytree_pre_hook is the place for that)"
            )
    return FlatInputs(tuple(leaves), spec, tuple(key))


def tensor_key(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Shape, dtype, device and strides; the stride of a dim of size 1 says nothing."""
    shape = tuple(tensor.shape)
    strides = tuple(step for step, size in zip(tensor.stride(), shape, strict=True) if size != 1)
    return ("tensor", shape, tensor.dtype, tensor.device, strides if tensor.numel() else ())


def leaf_path(input: Any, label: Any, at: int) -> str:
    pairs, _ = compat.pytree.tree_flatten_with_path((input, label))
    path = pairs[at][0]
    name = "input" if path[0].idx == 0 else "label"
    return name + compat.pytree.keystr(path[1:])
