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

__all__ = ["AcrossStretches", "apply_cp"]

AcrossStretches = Callable[..., Any]
"""`(forward, axis, *args, **kwargs)`: a layer's forward where its sequence is cut. `forward` is the layer's own, bound;
`axis` the `SequenceAxis`; the rest what the layer was called with, local tensors of this rank's stretch."""


def apply_cp(model: Module, *, mesh: DeviceMesh, across: Mapping[type, AcrossStretches] | None = None) -> Module:
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
        across: what layers of a class (or of its subclasses) do instead; for what needs more than placements, such as
            the state of a recurrence.

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
    plans: list[tuple[Any, _Plan]] = []
    for name, module in model.named_modules():
        if not isinstance(module, ProtocolModule):
            continue
        where = canonical_fqn(name) or type(module).__name__
        if module._parallelized or hasattr(module, "_context_plan"):
            raise ValueError(f"{where}: was laid out before; apply_cp comes once, before parallelize")
        plan = _plan(module, axis, where, across or {})
        if plan is not None:
            plans.append((module, plan))
    if not plans:
        raise ValueError(
            f"no layer of {type(model).__name__} declares what becomes of a sequence on the axis "
            f"{mesh.mesh_dim_names[0]!r}, so nothing would cut it"
        )
    for module, plan in plans:
        object.__setattr__(module, "_context_plan", plan)
        module.__class__ = _context_class(type(module))
    return model


@dataclass(frozen=True)
class _Plan:
    """What one layer does: per input a change, or another forward altogether."""

    where: str
    axis: SequenceAxis
    parameters: ForwardParameters
    cuts: Mapping[str, int]
    gathers: Mapping[str, int]
    instead: AcrossStretches | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> _Plan:
        return self

    def __call__(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.instead is not None:
            return self.instead(forward, self.axis, *args, **kwargs)
        args = tuple(self._take(self.parameters.name(index), value) for index, value in enumerate(args))
        return forward(*args, **{name: self._take(name, value) for name, value in kwargs.items()})

    def _take(self, name: str, value: Any) -> Any:
        if name not in self.cuts and name not in self.gathers:
            return value
        platform = get_platform()
        if not isinstance(value, platform.Tensor):
            raise ValueError(
                f"{self.where}: input {name!r} is {value!r}, but it has to be exchanged between the ranks that share a "
                "sequence: pass a tensor (for a mask: an explicit one)"
            )
        if name in self.cuts:
            return self.axis.cut(value, self.cuts[name])
        if isinstance(value, platform.DTensor):
            raise ValueError(
                f"{self.where}: input {name!r} is a distributed tensor, which cannot be gathered over another mesh; "
                "let the layer compute on local tensors (local_map)"
            )
        return self.axis.gather(value, self.gathers[name])


def _plan(module: Any, axis: SequenceAxis, where: str, across: Mapping[type, AcrossStretches]) -> _Plan | None:
    from hp_protocols.forward_sharding import ForwardParameters

    parameters = ForwardParameters.of(type(module).forward)
    for cls, instead in across.items():
        if isinstance(module, cls):
            return _Plan(where, axis, parameters, {}, {}, instead)
    config = module._sharding_config
    if config is None:
        return None
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
            raise ValueError(
                f"{where}: input {name!r} cannot be brought from {source} to {target} on a sequence's axis"
            )
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
