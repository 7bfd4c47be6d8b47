"""The registry behind `get_spec`: factories of model specs by name.

In: entry points of the group `hp_models.specs` and calls of `register_spec`. Out: names, flavors, and the spec that a
factory makes. An entry point is loaded only when its name is asked for; torch-free itself.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .errors import ConfigError, Fault, nearest
from .references import same_reference

if TYPE_CHECKING:
    from .model_spec import ModelSpec

__all__ = ["ENTRY_POINT_GROUP", "SpecFactory", "find_factory", "known_flavors", "list_flavors", "list_specs"]
__all__ += ["make_spec", "register_spec"]

ENTRY_POINT_GROUP = "hp_models.specs"

SpecFactory = Callable[[str], "ModelSpec"] | Mapping[str, "ModelSpec | Callable[[], ModelSpec]"]
"""`(flavor) -> ModelSpec`, with the optional attributes `flavors` and `default_flavor`; or a mapping of flavors."""

_registered: dict[str, SpecFactory] = {}


def register_spec(name: str, factory: SpecFactory) -> None:
    """Make a model known in this process; an installed package uses an entry point of `hp_models.specs` instead.

    Args:
        name: the model's name.
        factory: `(flavor) -> ModelSpec`, if it has them with attributes `flavors` (a sequence of names) and
            `default_flavor`; or a mapping from flavor to a spec, or to a function without arguments that makes it.

    Raises:
        ValueError: another factory has registered the name.
        TypeError: the factory is neither callable nor a mapping.
    """
    if not callable(factory) and not isinstance(factory, Mapping):
        raise TypeError(f"the factory of model spec {name!r} must be callable or a mapping, got {factory!r}")
    previous = _registered.get(name)
    if previous is not None and previous is not factory and not same_reference(previous, factory):
        raise _clash(name, [_origin(previous), _origin(factory)])
    _registered[name] = factory


def list_specs() -> list[str]:
    """The names of all known models, sorted. Imports none of them."""
    return sorted({*_registered, *(point.name for point in _entry_points())})


def list_flavors(name: str) -> list[str]:
    """The flavors of the model, in its own order; empty if its factory does not tell. Imports that model only.

    Raises:
        ConfigError: the name is unknown, or two distributions claim it.
    """
    return list(known_flavors(_factory(name)))


def make_spec(name: str, flavor: str | None) -> ModelSpec:
    """The spec as its factory makes it.

    Raises:
        ConfigError: unknown name or flavor, or a name that two distributions claim.
        ValueError: the factory made a spec of another name or flavor.
        TypeError: the factory made something else than a ModelSpec.
    """
    from .model_spec import ModelSpec

    factory = _factory(name)
    flavors = known_flavors(factory)
    if flavor is None:
        flavor = _default_flavor(name, factory, flavors)
    elif flavors and flavor not in flavors:
        near = nearest(flavor, flavors)
        raise ConfigError(
            Fault(
                f"flavor of model spec {name!r}",
                f"{flavor!r} is unknown",
                ", ".join(flavors),
                f"did you mean {near!r}?" if near else None,
            )
        )
    spec = _call(factory, flavor)
    if not isinstance(spec, ModelSpec):
        raise TypeError(f"{_origin(factory)} made {spec!r} for model spec {name!r}, not a ModelSpec")
    if (spec.name, spec.flavor) != (name, flavor):
        raise ValueError(
            f"{_origin(factory)} made a spec named {spec.name!r} ({spec.flavor!r}) for {name!r} ({flavor!r}); "
            "they must agree, since runs save their model by name and flavor"
        )
    return spec


def find_factory(name: str) -> SpecFactory | None:
    """The factory of that name, its entry point loaded; None if there is none."""
    return _factory(name) if name in list_specs() else None


def known_flavors(factory: SpecFactory) -> Sequence[str]:
    """The flavors that a factory names; empty if it does not tell."""
    if isinstance(factory, Mapping):
        return tuple(factory)
    return tuple(getattr(factory, "flavors", ()))


def _factory(name: str) -> SpecFactory:
    points = [point for point in _entry_points() if point.name == name]
    if len(points) > 1:
        raise _clash(name, [_point_origin(point) for point in points])
    registered = _registered.get(name)
    if not points:
        if registered is None:
            raise _unknown(name)
        return registered
    loaded = _load(points[0])
    # A package may both have the entry point and register itself when imported: with the same factory, that is one.
    registered = _registered.get(name)
    if registered is not None and registered is not loaded and not same_reference(registered, loaded):
        raise _clash(name, [_point_origin(points[0]), _origin(registered)])
    return loaded


def _entry_points() -> Sequence[importlib.metadata.EntryPoint]:
    return tuple(importlib.metadata.entry_points(group=ENTRY_POINT_GROUP))


def _load(point: importlib.metadata.EntryPoint) -> SpecFactory:
    try:
        factory: Any = point.load()
    except Exception as error:
        error.add_note(f"while loading model spec {_point_origin(point)}")
        raise
    if not callable(factory) and not isinstance(factory, Mapping):
        raise TypeError(f"model spec {_point_origin(point)} is {factory!r}, neither callable nor a mapping")
    return factory


def _call(factory: SpecFactory, flavor: str) -> Any:
    if not isinstance(factory, Mapping):
        return factory(flavor)
    entry: Any = factory[flavor]
    return entry() if callable(entry) else entry


def _default_flavor(name: str, factory: SpecFactory, flavors: Sequence[str]) -> str:
    default = getattr(factory, "default_flavor", None)
    if default is not None:
        return str(default)
    if len(flavors) == 1:
        return flavors[0]
    raise ConfigError(
        Fault(f"flavor of model spec {name!r}", "must be given, there is no default", ", ".join(flavors) or None)
    )


def _unknown(name: str) -> ConfigError:
    names = list_specs()
    near = nearest(name, names)
    hint = f"did you mean {near!r}?" if near else "install the package that offers it, or call register_spec"
    return ConfigError(Fault("model spec", f"{name!r} is unknown", ", ".join(names) or "none is installed", hint))


def _clash(name: str, origins: Sequence[str]) -> ConfigError:
    problem = f"is claimed by {' and by '.join(origins)}"
    return ConfigError(Fault(f"model spec {name!r}", problem, hint="uninstall or rename one of them"))


def _point_origin(point: importlib.metadata.EntryPoint) -> str:
    distribution = point.dist.name if point.dist is not None else "an unknown distribution"
    return f"{point.name!r} of {distribution} ({point.value})"


def _origin(factory: SpecFactory) -> str:
    """Who registered this factory: its distribution as far as it can be known, and its dotted name."""
    module = getattr(factory, "__module__", None)
    if module is None:
        return f"register_spec ({type(factory).__name__})"
    distributions = importlib.metadata.packages_distributions().get(module.split(".")[0], [])
    name = f"{module}.{getattr(factory, '__qualname__', type(factory).__name__)}"
    return f"{', '.join(distributions)} ({name})" if distributions else f"register_spec ({name})"
