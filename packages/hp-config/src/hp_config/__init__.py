"""ConfigManager, typed command line and strict YAML of hyper-parallel; does not need torch.

In: a recipe's name, flags, or a YAML file. Out: a checked config tree, or one ConfigError with all faults.
Every name is loaded when it is first used, so that importing this package costs next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hp_config.sections import (
        ActivationCheckpointConfig,
        CommConfig,
        CompileConfig,
        DebugConfig,
        ParallelismConfig,
        TrainingConfig,
    )
    from hp_protocols.errors import ConfigError, Fault

_HOME = {
    "ActivationCheckpointConfig": "hp_config.sections",
    "CommConfig": "hp_config.sections",
    "CompileConfig": "hp_config.sections",
    "ConfigError": "hp_protocols.errors",
    "DebugConfig": "hp_config.sections",
    "Fault": "hp_protocols.errors",
    "ParallelismConfig": "hp_config.sections",
    "TrainingConfig": "hp_config.sections",
}

__all__ = [
    "ActivationCheckpointConfig",
    "CommConfig",
    "CompileConfig",
    "ConfigError",
    "DebugConfig",
    "Fault",
    "ParallelismConfig",
    "TrainingConfig",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
    elif name == "__version__":
        from importlib.metadata import version

        value = version("hp-config")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME, "__version__"})
