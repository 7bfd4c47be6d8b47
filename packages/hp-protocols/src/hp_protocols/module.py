"""`Module`: a layer that is built from a config and declares how its states start and how they are sharded.

In: `param_init` and `sharding_config` in the layer's Config. Out: `init_states` (the same values for every layout) and
`parallelize(mesh)` (declared states become distributed tensors). Needs a backend.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self, TypeVar

from .configurable import Configurable
from .function import Function
from .module_tree import parameter_owners
from .platform import Module as PlatformModule
from .platform import nn
from .references import UnknownNameError, dotted_name, resolve_name
from .sharding import ShardingConfig
from .state_init import init_tree, skip_param_init
from .state_sharding import parallelize_tree

if TYPE_CHECKING:
    from .platform import DeviceMesh

__all__ = ["Module", "ModuleDict", "ModuleList", "Sequential", "skip_param_init"]

LayerT = TypeVar("LayerT", bound=PlatformModule)


class Module(PlatformModule, Configurable):
    """Base of all layers: the backend's module class, and a `Configurable`.

    Also a mixin for the backend's own layers: `class Linear(nn.Linear, Module)`; the layer's `__init__` runs once.
    Its Config must derive from `Module.Config`. What the Config declares is kept however the layer is made: by
    `Config.build()` or by calling the class with a config.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """What every layer may declare."""

        param_init: dict[str, Function.Config | Callable[..., Any]] | None = field(
            default=None, metadata={"cli": False}
        )
        """Initialisers by the name of the layer's own parameter. Each is called with the whole parameter and fills it
        in place. None: the layer's `reset_parameters`."""

        sharding_config: ShardingConfig | None = field(default=None, metadata={"cli": False})
        """The layout of the layer's states, inputs and outputs on a mesh. None: `parallelize` leaves it alone."""

    _param_init: dict[str, Function.Config | Callable[..., Any]] | None = None
    _sharding_config: ShardingConfig | None = None
    _parallelized: bool = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not issubclass(cls.Config, Module.Config):
            raise TypeError(f"{cls.__qualname__}.Config must derive from Module.Config, or from that of its parent")

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        self = super().__new__(cls)
        # Here and not in __init__: a mixin's __init__ hands its config to nobody.
        config = kwargs.get("config", args[0] if args else None)
        if isinstance(config, Module.Config):
            object.__setattr__(self, "_param_init", config.param_init)
            object.__setattr__(self, "_sharding_config", config.sharding_config)
        return self

    def __init__(self, config: Config | None = None) -> None:
        super().__init__()

    def to_empty(self, *, device: Any, recurse: bool = True) -> Self:
        """Move the tree to `device` without values, as the backend does it, but a tied parameter stays tied."""
        ties = [owners for _, owners in parameter_owners(self) if len(owners) > 1] if recurse else []
        super().to_empty(device=device, recurse=recurse)
        for first, *others in ties:
            for owner in others:
                setattr(owner.module, owner.name, getattr(first.module, first.name))
        return self

    def init_states(self, *, buffer_device: Any = None, seed: int | None = None) -> None:
        """Give every parameter and buffer of the tree its first value, children before parents.

        Each parameter is drawn whole, on the CPU, from a generator seeded by (`seed`, its canonical FQN in the module
        this is called on), then cut by its placements: the values are the same for every layout. Random numbers
        outside are not touched. A tied parameter is drawn once, under its first FQN. Plain containers, wrappers and
        layers in the tree are looked through; a plain layer needs `reset_parameters`.

        Args:
            buffer_device: handed to each `_init_self_buffers`: where to make buffers.
            seed: None means the process's own seed, or rank 0's where parameters are distributed (then every rank of
                the world must make this call).

        Raises:
            ValueError: a parameter without an initialiser, an entry of `param_init` that names no parameter, or a
                state that is still on the meta device; with its FQN.
        """
        init_tree(self, buffer_device=buffer_device, seed=seed)

    def _init_self_buffers(self, *, buffer_device: Any = None) -> None:
        """Fill the layer's own buffers; a layer with buffers overrides this.

        It may fill them in place or assign new whole tensors: a buffer that was distributed is made so again.
        """

    def parallelize(self, mesh: DeviceMesh) -> None:
        """Lay the tree out on `mesh` as its `sharding_config`s declare, children before parents.

        Declared parameters and buffers become distributed tensors, taken from rank 0; `forward` brings its inputs and
        outputs to the declared layouts. Everything is checked before anything is changed. Called before data
        parallelism is applied. `state_dict` keys do not change.

        Args:
            mesh: of one or more named axes; every placement must be declared for each of them.

        Raises:
            ValueError: the mesh has no names; a module was parallelized before; a state, an axis or an output that is
                needed is not declared, or one is declared that does not exist; with the FQN.
        """
        parallelize_tree(self, mesh)

    @staticmethod
    def from_nn_module(cls: type[LayerT]) -> type[LayerT]:
        """The Module version of a layer class that knows nothing of this protocol; the same one at every call.

        It takes the layer's own arguments. `Config(param_init=…, sharding_config=…).build(…)` takes them as keywords.
        """
        if issubclass(cls, Module):
            return cls
        layer: Any = cls
        version: type[LayerT] = _module_version(layer)
        return version


@functools.cache
def _module_version(cls: Any) -> Any:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        # `Config.build()` passes our config, which `Module.__new__` has read; a layer may have a `config` of its own.
        if isinstance(kwargs.get("config"), Module.Config):
            del kwargs["config"]
        cls.__init__(self, *args, **kwargs)

    functools.update_wrapper(__init__, cls.__init__, assigned=("__doc__",), updated=())
    namespace = {"__init__": __init__, "__module__": __name__, "__qualname__": _generated_name(cls)}
    return type(cls.__name__, (cls, Module), namespace)


# Generated classes are found by name (pickle, `_type` in a config) through this module's `__getattr__`; a name must
# not contain dots, which would be read as a path.
_GENERATED = "from_nn_module("


def _generated_name(cls: type) -> str:
    try:
        return f"{_GENERATED}{dotted_name(cls).replace('.', '/')})"
    except TypeError:  # A class inside a function: cannot be found by name, like the class itself.
        return f"from_nn_module.<locals>.{cls.__name__}"


def __getattr__(name: str) -> Any:
    if name.startswith(_GENERATED) and name.endswith(")"):
        try:
            return Module.from_nn_module(resolve_name(name[len(_GENERATED) : -1].replace("/", ".")))
        except UnknownNameError as error:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}: {error}") from None
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class ModuleList(nn.ModuleList, Module):
    """The backend's ModuleList as a Module."""


class ModuleDict(nn.ModuleDict, Module):
    """The backend's ModuleDict as a Module."""


class Sequential(nn.Sequential, Module):
    """The backend's Sequential as a Module."""
