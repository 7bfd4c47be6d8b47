"""Context parallelism: several ranks share one sequence, each computing a contiguous stretch of it.

In: a model whose layers declare what becomes of their inputs on the axis `cp`, and what to do across stretches where
placements cannot say it. Out: the same model, changed in place: it takes whole sequences and returns stretches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hp_protocols.platform import get_platform
from hp_protocols.sharding import ShardingConfig, resolve_placements
from hp_protocols.types import NamedPlacement, Placement

from .fqn import canonical_fqn
from .sequence_axis import SequenceAxis

if TYPE_CHECKING:
    from hp_protocols.forward_sharding import ForwardParameters
    from hp_protocols.platform import DeviceMesh, Module

__all__ = ["apply_cp"]


def apply_cp(model: Module, *, mesh: DeviceMesh, across: Mapping[type, type] | None = None) -> Module:
    """Let the ranks of `mesh` share each sequence; in place. Names in `state_dict` do not change.

    Apply it before `Module.parallelize`: the exchange between stretches then runs on the local tensors of tensor
    parallelism. Gradients of parameters are those of a rank's stretch; data parallelism over `fsdp`, which includes
    `cp`, sums them.

    Each layer's `ShardingConfig` says by its placements on `mesh`'s axis what is done with an input:
    `Replicate` → `Shard(d)` (in_src → in_dst): this rank's stretch is cut from it, along dim d. `Shard(d)` →
    `Replicate`: it is gathered, and its gradient summed, which `local_map` has to declare as `Partial`. Anything else
    has to stay as it is.

    Args:
        mesh: one axis, named as in the declarations (`cp`).
        across: by class of layer, the subclass that a layer becomes, for what needs more than placements, such as the
            state of a recurrence. It finds the ranks in its attribute `sequence_axis` (a `SequenceAxis`).

    Returns:
        `model`.

    Raises:
        ValueError: a declaration that cannot be carried out, with its FQN; no layer that does anything; the model was
            parallelized or cut before; a mesh of several axes.
    """
    from hp_protocols.module import Module as ProtocolModule

    axis = SequenceAxis(mesh)
    if not mesh.mesh_dim_names:
        raise ValueError("the device mesh has no axis name; make it with mesh_dim_names=('cp',)")
    changes: list[tuple[Any, type, str, Any]] = []
    for name, module in model.named_modules():
        if not isinstance(module, ProtocolModule):
            continue
        where = canonical_fqn(name) or type(module).__name__
        if module._parallelized or hasattr(module, "_context_plan") or hasattr(module, "sequence_axis"):
            raise ValueError(f"{where}: was laid out before; apply_cp comes once, before parallelize")
        variant = _variant(module, across or {}, where)
        if variant is not None:
            changes.append((module, variant, "sequence_axis", axis))
        elif (plan := _plan(module, axis, where)) is not None:
            layer_class: Any = type(module)
            changes.append((module, _context_class(layer_class), "_context_plan", plan))
    if not changes:
        raise ValueError(
            f"no layer of {type(model).__name__} declares what becomes of a sequence on the axis "
            f"{mesh.mesh_dim_names[0]!r}, so nothing would cut it"
        )
    for module, cls, attribute, value in changes:
        object.__setattr__(module, attribute, value)
        module.__class__ = cls
    return model


def _variant(module: Any, across: Mapping[type, type], where: str) -> type | None:
    """The class that this layer becomes, or None."""
    for cls, variant in across.items():
        if not isinstance(module, cls):
            continue
        if type(module) is not cls or not issubclass(variant, cls):
            raise ValueError(
                f"{where}: {variant.__qualname__} stands in for {cls.__qualname__} itself, not for "
                f"{type(module).__qualname__}; give `across` an entry for it"
            )
        return variant
    return None


@dataclass(frozen=True)
class _Plan:
    """Which inputs of one layer are cut or gathered, each along which dim."""

    where: str
    axis: SequenceAxis
    parameters: ForwardParameters
    cuts: Mapping[str, int]
    gathers: Mapping[str, int]

    def __deepcopy__(self, memo: dict[int, Any]) -> _Plan:
        return self

    def __call__(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args = tuple(self._take(self.parameters.name(index), value) for index, value in enumerate(args))
        return forward(*args, **{name: self._take(name, value) for name, value in kwargs.items()})

    def _take(self, name: str, value: Any) -> Any:
        # None: an optional input that is left out.
        if value is None or (name not in self.cuts and name not in self.gathers):
            return value
        platform = get_platform()
        if not isinstance(value, platform.Tensor):
            raise ValueError(
                f"{self.where}: input {name!r} is a {type(value).__name__}, but it is declared to be cut or gathered "
                "between the ranks that share a sequence: pass a tensor"
            )
        if name in self.cuts:
            return self.axis.cut(value, self.cuts[name])
        if isinstance(value, platform.DTensor):
            raise ValueError(
                f"{self.where}: input {name!r} is a distributed tensor, which cannot be gathered over another mesh; "
                "let the layer compute on local tensors (local_map)"
            )
        return self.axis.gather(value, self.gathers[name])


def _plan(module: Any, axis: SequenceAxis, where: str) -> _Plan | None:
    from hp_protocols.forward_sharding import ForwardParameters

    config = module._sharding_config
    if config is None:
        return None
    parameters = ForwardParameters.of(type(module).forward)
    cuts: dict[str, int] = {}
    gathers: dict[str, int] = {}
    for name, target in _on_axis(config.in_dst_shardings, axis, where).items():
        source = _on_axis(config.in_src_shardings, axis, where).get(name, target)
        if source == target:
            continue
        if source.is_replicate() and target.is_shard():
            cuts[name] = target.dim
        elif source.is_shard() and target.is_replicate():
            _check_gradient(config, parameters, name, axis, where)
            gathers[name] = source.dim
        else:
            raise ValueError(f"{where}: input {name!r} cannot go from {source} to {target} on a sequence's axis")
    return _Plan(where, axis, parameters, cuts, gathers) if cuts or gathers else None


def _on_axis(declared: Mapping[str, NamedPlacement] | None, axis: SequenceAxis, where: str) -> dict[str, Any]:
    """Placements on the one axis, by input."""
    found = {}
    for name, named in (declared or {}).items():
        try:
            (found[name],) = resolve_placements(named, axis.mesh.mesh_dim_names)
        except ValueError as error:
            raise ValueError(f"{where}: input {name!r}: {error}") from None
    return found


def _check_gradient(
    config: ShardingConfig, parameters: ForwardParameters, name: str, axis: SequenceAxis, where: str
) -> None:
    """Every rank uses what was gathered, so its gradient is a partial sum; a declaration that says else is wrong."""
    gradients = config.local_map.in_grad_placements if config.local_map is not None else ()
    names = parameters.positional + parameters.keyword_only
    index = names.index(name) if name in names else len(gradients)
    named = gradients[index] if index < len(gradients) else None
    placement: Placement | None = None
    if named is not None:
        (placement,) = resolve_placements(named, axis.mesh.mesh_dim_names)
    if placement is None or not placement.is_partial():
        raise ValueError(
            f"{where}: input {name!r} is gathered from its stretches, and every rank computes a part of its gradient; "
            "declare it as Partial in local_map.in_grad_placements"
        )


@functools.cache
def _context_class(cls: Any) -> Any:
    """The subclass whose forward follows the instance's `_context_plan`."""

    @functools.wraps(cls.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._context_plan(functools.partial(cls.forward, self), args, kwargs)

    namespace = {"forward": forward, "__module__": cls.__module__, "__doc__": cls.__doc__}
    return type(f"Context{cls.__name__}", (cls,), namespace)
