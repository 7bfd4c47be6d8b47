"""Names and order of the modules in a tree, seen through plain containers and wrappers.

In: a module. Out: canonical FQNs (wrappers do not show), the owners of each parameter, and the text by which errors
name a module.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .distributed import canonical_fqn

if TYPE_CHECKING:
    from .platform import Module as PlatformModule
    from .platform import Parameter

__all__ = ["ModuleNames", "ParameterOwner", "describe", "own_buffers", "own_parameters", "parameter_owners"]


class ModuleNames:
    """The canonical FQN of each module in the tree of `root`; a module that occurs twice has its first name."""

    def __init__(self, root: PlatformModule) -> None:
        self._names = {id(module): canonical_fqn(name) for name, module in root.named_modules()}

    def __getitem__(self, module: PlatformModule) -> str:
        # A module that joined the tree after the walk has begun has no name yet.
        return self._names.get(id(module), type(module).__name__)

    def state(self, module: PlatformModule, name: str) -> str:
        """The canonical FQN of the module's own parameter or buffer `name`."""
        fqn = self[module]
        return f"{fqn}.{name}" if fqn else name

    def describe(self, module: PlatformModule) -> str:
        """How errors name the module."""
        return describe(self[module], module)


def describe(fqn: str, module: PlatformModule) -> str:
    """`layers.0.wq (Linear)`; the root of a tree has no name and is called by its class alone."""
    return f"{fqn} ({type(module).__name__})" if fqn else f"{type(module).__name__} (the root)"


def own_parameters(module: PlatformModule) -> dict[str, Parameter]:
    """The parameters that are the module's own, not those of its children."""
    return dict(module.named_parameters(recurse=False, remove_duplicate=False))


def own_buffers(module: PlatformModule) -> dict[str, Any]:
    """The buffers that are the module's own; those registered as None are left out."""
    return dict(module.named_buffers(recurse=False, remove_duplicate=False))


@dataclass(frozen=True, slots=True)
class ParameterOwner:
    """One place where a parameter is registered."""

    module: PlatformModule
    name: str
    fqn: str


def parameter_owners(root: PlatformModule) -> Iterator[tuple[Parameter, list[ParameterOwner]]]:
    """Every parameter of the tree with all its places: more than one if it is tied."""
    parameters: dict[int, tuple[Parameter, list[ParameterOwner]]] = {}
    names = ModuleNames(root)
    for module in root.modules():
        for name, parameter in own_parameters(module).items():
            entry = parameters.setdefault(id(parameter), (parameter, []))
            entry[1].append(ParameterOwner(module, name, names.state(module, name)))
    yield from parameters.values()
