"""ConfigManager, typed command line and strict YAML of hyper-parallel; does not need torch.

In: a recipe's name, flags, or a YAML file. Out: a checked config tree, or one ConfigError with all faults.
Every name is loaded when it is first used, so that importing this package costs next to nothing; `TORCH_DTYPE_MAP`
alone needs torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hp_config._legacy import HyperTrainerConfig, parse_args
    from hp_config.command_line import MissingExtraError
    from hp_config.difference import Difference, diff_configs
    from hp_config.manager import ConfigManager, load_yaml
    from hp_config.recipes import Recipe, list_recipes
    from hp_config.sections import (
        ActivationCheckpointConfig,
        CommConfig,
        CompileConfig,
        DebugConfig,
        ParallelismConfig,
        TrainingConfig,
    )
    from hp_config.validation import check_layout, find_faults, validate_config
    from hp_config.yaml_config import dump_yaml
    from hp_protocols.errors import ConfigError, Fault
    from hp_protocols.function import Function
    from hp_protocols.platform import TORCH_DTYPE_MAP as TORCH_DTYPE_MAP

    __version__: str

# Without TORCH_DTYPE_MAP, so that a star import needs no torch.
__all__ = [
    "ActivationCheckpointConfig",
    "CommConfig",
    "CompileConfig",
    "ConfigError",
    "ConfigManager",
    "DebugConfig",
    "Difference",
    "Fault",
    "Function",
    "HyperTrainerConfig",
    "MissingExtraError",
    "ParallelismConfig",
    "Recipe",
    "TrainingConfig",
    "check_layout",
    "diff_configs",
    "dump_yaml",
    "find_faults",
    "list_recipes",
    "load_yaml",
    "parse_args",
    "validate_config",
]

_HOME = {
    "ActivationCheckpointConfig": "hp_config.sections",
    "CommConfig": "hp_config.sections",
    "CompileConfig": "hp_config.sections",
    "ConfigError": "hp_protocols.errors",
    "ConfigManager": "hp_config.manager",
    "DebugConfig": "hp_config.sections",
    "Difference": "hp_config.difference",
    "Fault": "hp_protocols.errors",
    "Function": "hp_protocols.function",
    "HyperTrainerConfig": "hp_config._legacy",
    "MissingExtraError": "hp_config.command_line",
    "ParallelismConfig": "hp_config.sections",
    "Recipe": "hp_config.recipes",
    "TORCH_DTYPE_MAP": "hp_protocols.platform",
    "TrainingConfig": "hp_config.sections",
    "check_layout": "hp_config.validation",
    "diff_configs": "hp_config.difference",
    "dump_yaml": "hp_config.yaml_config",
    "find_faults": "hp_config.validation",
    "list_recipes": "hp_config.recipes",
    "load_yaml": "hp_config.manager",
    "parse_args": "hp_config._legacy",
    "validate_config": "hp_config.validation",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("hp-config")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
