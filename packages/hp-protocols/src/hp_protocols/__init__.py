"""Configurable, Module, ShardingConfig, ModelSpec and the platform layer of hyper-parallel.

In: nothing. Out: the public names of the package, each loaded on first use, so that importing the package imports no
torch. `Module` and `BaseModel` need a backend; everything about configs does not.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .configurable import Configurable
    from .errors import ConfigError, Fault, nearest
    from .function import Function
    from .model import BaseModel, ModelConfigConverter
    from .model_spec import ModelSpec, get_spec, list_flavors, list_specs, register_spec
    from .module import Module, ModuleDict, ModuleList, Sequential, skip_param_init
    from .platform import CapabilityError, get_platform
    from .sharding import LocalMapConfig, ShardingConfig, resolve_placements
    from .state_dict_adapter import BaseStateDictAdapter
    from .types import MeshAxisName, NamedPlacement

    __version__: str

__all__ = [
    "BaseModel",
    "BaseStateDictAdapter",
    "CapabilityError",
    "ConfigError",
    "Configurable",
    "Fault",
    "Function",
    "LocalMapConfig",
    "MeshAxisName",
    "ModelConfigConverter",
    "ModelSpec",
    "Module",
    "ModuleDict",
    "ModuleList",
    "NamedPlacement",
    "Sequential",
    "ShardingConfig",
    "get_platform",
    "get_spec",
    "list_flavors",
    "list_specs",
    "nearest",
    "register_spec",
    "resolve_placements",
    "skip_param_init",
]

# `override` is not here: the package attribute of that name is the submodule.
_SUBMODULE = {
    "BaseModel": "model",
    "BaseStateDictAdapter": "state_dict_adapter",
    "CapabilityError": "platform",
    "ConfigError": "errors",
    "Configurable": "configurable",
    "Fault": "errors",
    "Function": "function",
    "LocalMapConfig": "sharding",
    "MeshAxisName": "types",
    "ModelConfigConverter": "model",
    "ModelSpec": "model_spec",
    "Module": "module",
    "ModuleDict": "module",
    "ModuleList": "module",
    "NamedPlacement": "types",
    "Sequential": "module",
    "ShardingConfig": "sharding",
    "get_platform": "platform",
    "get_spec": "model_spec",
    "list_flavors": "model_spec",
    "list_specs": "model_spec",
    "nearest": "errors",
    "register_spec": "model_spec",
    "resolve_placements": "sharding",
    "skip_param_init": "module",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("hp-protocols")
    if name not in _SUBMODULE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_SUBMODULE[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
