"""The layout of what goes into and comes out of a sharded layer's forward.

In: a layer's `ShardingConfig` and a mesh. Out: a `ForwardPlan`, and the class of the layer whose forward follows it:
reshard inputs, unwrap for local_map, the layer's own forward, wrap, reshard outputs.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .errors import nearest
from .platform import get_platform
from .sharding import ShardingConfig, resolve_placements
from .types import NamedPlacement, Placement

if TYPE_CHECKING:
    from .platform import DeviceMesh
    from .platform import Module as PlatformModule

__all__ = ["ForwardParameters", "ForwardPlan", "plan_forward", "resharding_class"]


@dataclass(frozen=True, slots=True)
class _Layout:
    """Placements in the order of the mesh's axes."""

    placements: tuple[Placement, ...]


# A `_Layout` holds for everything below it, a tuple or dict goes one level down, None leaves things alone.
_LayoutTree = _Layout | tuple[Any, ...] | dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class ForwardParameters:
    """The names that a forward takes, as a call needs them."""

    positional: tuple[str, ...]
    keyword_only: tuple[str, ...]
    var_positional: str | None
    var_keyword: bool

    @classmethod
    def of(cls, forward: Callable[..., Any]) -> ForwardParameters:
        parameters = list(inspect.signature(forward).parameters.values())[1:]  # Without self.

        def of_kind(*kinds: Any) -> tuple[str, ...]:
            return tuple(parameter.name for parameter in parameters if parameter.kind in kinds)

        return cls(
            positional=of_kind(inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD),
            keyword_only=of_kind(inspect.Parameter.KEYWORD_ONLY),
            var_positional=next(iter(of_kind(inspect.Parameter.VAR_POSITIONAL)), None),
            var_keyword=bool(of_kind(inspect.Parameter.VAR_KEYWORD)),
        )

    @property
    def named(self) -> tuple[str, ...]:
        """Every name that can be declared; with `**kwargs`, others can be too."""
        return self.positional + self.keyword_only + ((self.var_positional,) if self.var_positional else ())

    def name(self, index: int) -> str:
        """The parameter that takes the positional argument at `index`; "" if there is none (the call will fail)."""
        return self.positional[index] if index < len(self.positional) else self.var_positional or ""


@dataclass(frozen=True)
class ForwardPlan:
    """What happens around one layer's forward. Immutable; a copy of the layer shares it."""

    where: str
    mesh: DeviceMesh
    parameters: ForwardParameters
    sources: Mapping[str, _Layout] = field(default_factory=dict)
    targets: Mapping[str, _Layout] = field(default_factory=dict)
    out_source: _LayoutTree = None
    out_target: _LayoutTree = None
    local_gradients: Mapping[str, _Layout] | None = None
    """Layouts of input gradients under local_map; None without local_map."""

    def __deepcopy__(self, memo: dict[int, Any]) -> ForwardPlan:
        return self  # The mesh has process groups, which cannot be copied.

    def __call__(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call `forward` between the declared layouts."""
        args = tuple(self._take(self.parameters.name(index), value) for index, value in enumerate(args))
        kwargs = {name: self._take(name, value) for name, value in kwargs.items()}
        output = forward(*args, **kwargs)
        output = self._map(output, self.out_source, self._as_distributed, "output")
        return self._map(output, self.out_target, self._bring_output, "output")

    def _take(self, name: str, value: Any) -> Any:
        """An argument as forward is to see it; tensors inside tuples, lists and dicts follow the same declaration."""
        declared = name in self.sources or name in self.targets
        if not declared and self.local_gradients is None:
            return value
        return _map_tensors(value, functools.partial(self._take_tensor, name))

    def _take_tensor(self, name: str, value: Any) -> Any:
        where = f"{self.where}: input {name!r}"
        source, target = self.sources.get(name), self.targets.get(name)
        if source is not None:
            value = self._as_distributed(value, source, where)
        if target is not None:
            value = self._bring(value, target, where, "in_src_shardings")
        if self.local_gradients is None or not isinstance(value, get_platform().DTensor):
            return value
        if source is None and target is None:
            raise ValueError(
                f"{where} is a distributed tensor, and forward computes on local ones (local_map): declare its layout "
                "in in_dst_shardings"
            )
        gradient = self.local_gradients.get(name)
        return value.to_local(grad_placements=None if gradient is None else gradient.placements)

    def _as_distributed(self, value: Any, layout: _Layout, where: str) -> Any:
        """A plain tensor as this rank's part of a distributed one. Its dims must divide evenly where it is sharded."""
        dtensor = get_platform().DTensor
        if isinstance(value, dtensor):
            return value
        return dtensor.from_local(value, self.mesh, layout.placements, run_check=False)

    def _bring_output(self, value: Any, layout: _Layout, where: str) -> Any:
        return self._bring(value, layout, where, "out_src_shardings")

    def _bring(self, value: Any, layout: _Layout, where: str, source_field: str) -> Any:
        if not isinstance(value, get_platform().DTensor):
            raise ValueError(
                f"{where} is a plain tensor, which says nothing of its layout; declare it in {source_field}, or leave "
                "it undeclared on both sides"
            )
        # Also where the layout is right already: the backward of a redistribution brings the gradient, which may be
        # a partial sum by then, back to the layout of the value.
        if tuple(value.placements) == layout.placements and not value.requires_grad:
            return value
        return value.redistribute(placements=layout.placements)

    def _map(self, value: Any, layouts: _LayoutTree, change: Callable[[Any, _Layout, str], Any], what: str) -> Any:
        """`change` every tensor of `value` for which `layouts`, a prefix of its structure, holds a layout."""
        if layouts is None:
            return value
        where = f"{self.where}: {what}"
        if isinstance(layouts, _Layout):
            return _map_tensors(value, lambda tensor: change(tensor, layouts, where))
        if isinstance(layouts, tuple):
            if not isinstance(value, tuple | list) or len(value) != len(layouts):
                raise ValueError(f"{where} is declared as a tuple of {len(layouts)}, but is {_shape_of(value)}")
            items = [self._map(v, layouts[i], change, f"{what}[{i}]") for i, v in enumerate(value)]
            return _rebuilt(value, items)
        if not isinstance(value, Mapping) or not layouts.keys() <= value.keys():
            raise ValueError(f"{where} is declared as a dict with {', '.join(layouts)}, but is {_shape_of(value)}")
        changed = {key: self._map(value[key], layouts[key], change, f"{what}[{key!r}]") for key in layouts}
        return _with_items(value, {key: item for key, item in changed.items() if item is not value[key]})


def plan_forward(config: ShardingConfig, module: PlatformModule, mesh: DeviceMesh, where: str) -> ForwardPlan | None:
    """The plan for the module's forward, or None if its config declares nothing about inputs and outputs.

    Raises:
        ValueError: an axis or an output layout is missing, or an input is declared that forward does not take.
    """
    sources, targets = config.in_src_shardings or {}, config.in_dst_shardings or {}
    outputs_declared = config.out_src_shardings is not None or config.out_dst_shardings is not None
    if not sources and not targets and not outputs_declared and config.local_map is None:
        return None
    axes = mesh.mesh_dim_names

    def resolve(named: NamedPlacement, what: str) -> _Layout:
        try:
            return _Layout(resolve_placements(named, axes))
        except ValueError as error:
            raise ValueError(f"{where}: {what}: {error}") from None

    parameters = ForwardParameters.of(type(module).forward)
    for field_name, declared in (("in_src_shardings", sources), ("in_dst_shardings", targets)):
        _check_inputs(parameters, declared, f"{where}: {field_name}")
    return ForwardPlan(
        where=where,
        mesh=mesh,
        parameters=parameters,
        sources={name: resolve(named, f"in_src_shardings[{name!r}]") for name, named in sources.items()},
        targets={name: resolve(named, f"in_dst_shardings[{name!r}]") for name, named in targets.items()},
        out_source=_layout_tree(config.out_src_shardings, "out_src_shardings", resolve),
        out_target=_layout_tree(config.out_dst_shardings, "out_dst_shardings", resolve),
        local_gradients=_local_gradients(config, parameters, where, resolve),
    )


def _check_inputs(parameters: ForwardParameters, declared: Mapping[str, Any], where: str) -> None:
    for name in declared:
        if name not in parameters.named and not parameters.var_keyword:
            near = nearest(name, parameters.named)
            raise ValueError(
                f"{where}: forward takes no {name!r}; "
                + (f"did you mean {near!r}?" if near else f"it takes: {', '.join(parameters.named) or 'nothing'}")
            )


def _local_gradients(
    config: ShardingConfig, parameters: ForwardParameters, where: str, resolve: Callable[[NamedPlacement, str], _Layout]
) -> Mapping[str, _Layout] | None:
    if config.local_map is None:
        return None
    if config.out_src_shardings is None:
        raise ValueError(
            f"{where}: local_map needs out_src_shardings, the layout of what forward computes on local tensors"
        )
    gradients = config.local_map.in_grad_placements
    names = parameters.positional + parameters.keyword_only
    if len(gradients) > len(names):
        raise ValueError(
            f"{where}: local_map.in_grad_placements has {len(gradients)} entries, forward takes {len(names)} inputs: "
            + ", ".join(names)
        )
    return {
        name: resolve(named, f"local_map.in_grad_placements[{index}]")
        for index, (name, named) in enumerate(zip(names, gradients, strict=False))
        if named is not None
    }


def _layout_tree(declared: Any, where: str, resolve: Callable[[NamedPlacement, str], _Layout]) -> _LayoutTree:
    if declared is None:
        return None
    if isinstance(declared, tuple | list):
        return tuple(_layout_tree(part, f"{where}[{index}]", resolve) for index, part in enumerate(declared))
    if any(not isinstance(part, Placement) for part in declared.values()):
        return {key: _layout_tree(part, f"{where}[{key!r}]", resolve) for key, part in declared.items()}
    return resolve(declared, where)


@functools.cache
def resharding_class(cls: Any) -> Any:
    """The subclass whose forward follows the instance's `_forward_plan`.

    A class, as `fully_shard` makes one, and not a function set on the instance: copies of the layer keep their own
    forward, and `super()` and hooks work as ever.
    """

    @functools.wraps(cls.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._forward_plan(functools.partial(cls.forward, self), args, kwargs)

    namespace = {"forward": forward, "__module__": cls.__module__, "__doc__": cls.__doc__}
    return type(f"Parallel{cls.__name__}", (cls,), namespace)


# Nested values


def _map_tensors(value: Any, change: Callable[[Any], Any]) -> Any:
    """The same structure with every tensor changed; whatever has no changed tensor in it stays the same object."""
    if isinstance(value, get_platform().Tensor):
        return change(value)
    if isinstance(value, tuple | list):
        items = [_map_tensors(item, change) for item in value]
        return _rebuilt(value, items)
    if isinstance(value, Mapping):
        changed = {key: _map_tensors(item, change) for key, item in value.items()}
        return _with_items(value, {key: item for key, item in changed.items() if item is not value[key]})
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
        changed = {name: _map_tensors(item, change) for name, item in fields.items()}
        changed = {name: item for name, item in changed.items() if item is not fields[name]}
        return dataclasses.replace(value, **changed) if changed else value
    return value


def _rebuilt(value: Any, items: list[Any]) -> Any:
    if all(new is old for new, old in zip(items, value, strict=True)):
        return value
    return value._make(items) if hasattr(value, "_make") else type(value)(items)


def _with_items(value: Any, changed: dict[Any, Any]) -> Any:
    if not changed:
        return value
    new = copy.copy(value)
    for key, item in changed.items():
        new[key] = item
    return new


def _shape_of(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} with {', '.join(map(str, value))}"
    return f"a {type(value).__name__}"
