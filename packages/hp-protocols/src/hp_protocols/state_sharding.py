"""Carrying out the `sharding_config`s of a module tree on a mesh.

In: a tree and a named mesh. Out: the same tree with its declared states distributed and its forwards resharding.
Everything is checked before the first module is changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .errors import nearest
from .forward_sharding import ForwardPlan, plan_forward, resharding_class
from .module_tree import ModuleNames, ParameterOwner, own_buffers, own_parameters, parameter_owners
from .platform import get_platform
from .sharding import ShardingConfig, resolve_placements
from .types import Placement

if TYPE_CHECKING:
    from .module import Module
    from .platform import DeviceMesh, Parameter
    from .platform import Module as PlatformModule

__all__ = ["parallelize_tree"]


@dataclass(frozen=True, slots=True)
class _ModulePlan:
    """What is to be done with one module."""

    states: dict[str, tuple[Placement, ...]]
    forward: ForwardPlan | None


def parallelize_tree(module: Module, mesh: DeviceMesh) -> None:
    """What `Module.parallelize` does."""
    with _parallelize_pass(module, mesh) as current:
        current.check_mesh(module, mesh)
        current.check_first_time(module)
        module._parallelized = True
        current.visit_children(module, mesh)
        current.apply(module, mesh)


class _ParallelizePass:
    """One walk over a tree, from the call on its root on."""

    def __init__(self, root: Module, mesh: DeviceMesh) -> None:
        self.names = ModuleNames(root)
        self.visited: set[int] = {id(root)}
        # Parameters that have been distributed, by the id of the plain one (kept alive with it): a tied one once.
        self.distributed: dict[int, tuple[Parameter, Parameter]] = {}
        self.check_mesh(root, mesh)
        self.plans = self._plan(root, mesh)
        self._check_ties(root)

    def check_mesh(self, module: PlatformModule, mesh: DeviceMesh) -> None:
        if not mesh.mesh_dim_names:
            raise ValueError(
                f"{self.names.describe(module)}: the device mesh has no axis names; make it with mesh_dim_names=(…)"
            )

    def check_first_time(self, module: Module) -> None:
        if module._parallelized:
            raise ValueError(
                f"{self.names.describe(module)}: was parallelized before; parallelize is called once, with a mesh of "
                "all the axes"
            )

    def _plan(self, root: Module, mesh: DeviceMesh) -> dict[int, _ModulePlan]:
        from .module import Module

        plans: dict[int, _ModulePlan] = {}
        for module in root.modules():
            # A class with a `parallelize` of its own decides itself what becomes of its `sharding_config`.
            if not isinstance(module, Module) or type(module).parallelize is not Module.parallelize:
                continue
            self.check_first_time(module)
            if module._sharding_config is not None:
                plans[id(module)] = self._plan_module(module, module._sharding_config, mesh)
        return plans

    def _plan_module(self, module: Module, config: ShardingConfig, mesh: DeviceMesh) -> _ModulePlan:
        where = self.names.describe(module)
        registered = [*module._parameters, *module._buffers]
        for name in config.state_shardings:
            if name not in registered:
                near = nearest(name, registered)
                raise ValueError(
                    f"{where}: state_shardings declares {name!r}, which is neither a parameter nor a buffer of it; "
                    + (f"did you mean {near!r}?" if near else f"it has: {', '.join(registered) or 'none'}")
                )
        states: dict[str, tuple[Placement, ...]] = {}
        for name, state in (own_parameters(module) | own_buffers(module)).items():
            fqn = self.names.state(module, name)
            if name not in config.state_shardings:
                raise ValueError(
                    f"{fqn}: {type(module).__name__} declares no placement for it in state_shardings; declared: "
                    f"{', '.join(config.state_shardings) or 'none'}"
                )
            try:
                states[name] = resolve_placements(config.state_shardings[name], mesh.mesh_dim_names)
            except ValueError as error:
                raise ValueError(f"{fqn}: {error}") from None
            _check_not_distributed_otherwise(state, states[name], mesh, fqn)
        return _ModulePlan(states, plan_forward(config, module, mesh, where))

    def _check_ties(self, root: Module) -> None:
        """A tied parameter must be laid out alike by all its owners, or it would come apart."""
        for _, owners in parameter_owners(root):
            layouts = [self._layout(owner) for owner in owners]
            if any(layout != layouts[0] for layout in layouts):
                declared = ", ".join(f"{o.fqn}: {layout}" for o, layout in zip(owners, layouts, strict=True))
                raise ValueError(f"a tied parameter has different placements under its names ({declared})")

    def _layout(self, owner: ParameterOwner) -> tuple[Placement, ...] | None:
        plan = self.plans.get(id(owner.module))
        return None if plan is None else plan.states.get(owner.name)

    def visit_children(self, module: PlatformModule, mesh: DeviceMesh) -> None:
        from .module import Module

        for child in module.children():
            if id(child) in self.visited:
                continue
            self.visited.add(id(child))
            if isinstance(child, Module):
                child.parallelize(mesh)
            else:
                self.visit_children(child, mesh)

    def apply(self, module: Module, mesh: DeviceMesh) -> None:
        plan = self.plans.get(id(module))
        if plan is None:
            if module._sharding_config is None:
                return
            # Reached by a class's own `parallelize` that calls its parent's.
            plan = self._plan_module(module, module._sharding_config, mesh)
        self._shard_states(module, plan, mesh)
        if plan.forward is not None:
            object.__setattr__(module, "_forward_plan", plan.forward)
            cls: Any = type(module)
            module.__class__ = resharding_class(cls)

    def _shard_states(self, module: Module, plan: _ModulePlan, mesh: DeviceMesh) -> None:
        platform = get_platform()
        for name, parameter in own_parameters(module).items():
            if isinstance(parameter, platform.DTensor):
                continue
            if id(parameter) not in self.distributed:
                new = _distributed_parameter(parameter, mesh, plan.states[name])
                self.distributed[id(parameter)] = (parameter, new)
            setattr(module, name, self.distributed[id(parameter)][1])
        for name, buffer in own_buffers(module).items():
            if not isinstance(buffer, platform.DTensor):
                setattr(module, name, platform.distribute_tensor(buffer, mesh, plan.states[name]))


def _check_not_distributed_otherwise(state: Any, placements: tuple[Placement, ...], mesh: DeviceMesh, fqn: str) -> None:
    if not isinstance(state, get_platform().DTensor):
        return
    if state.device_mesh != mesh or tuple(state.placements) != placements:
        raise ValueError(
            f"{fqn}: is distributed already, over {state.device_mesh.mesh_dim_names} as {state.placements}; "
            "parallelize comes before data parallelism"
        )


def _distributed_parameter(parameter: Parameter, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> Parameter:
    platform = get_platform()
    tensor = platform.distribute_tensor(parameter.detach(), mesh, placements)
    new = platform.Parameter(tensor, requires_grad=parameter.requires_grad)
    new.__dict__.update(parameter.__dict__)  # Marks that others have put on the parameter.
    return new


_current_pass: ContextVar[_ParallelizePass | None] = ContextVar("parallelize_pass", default=None)


@contextmanager
def _parallelize_pass(module: Module, mesh: DeviceMesh) -> Iterator[_ParallelizePass]:
    """The pass of the enclosing `parallelize`; a new one at the root."""
    current = _current_pass.get()
    if current is not None:
        yield current
        return
    current = _ParallelizePass(module, mesh)
    token = _current_pass.set(current)
    try:
        yield current
    finally:
        _current_pass.reset(token)
