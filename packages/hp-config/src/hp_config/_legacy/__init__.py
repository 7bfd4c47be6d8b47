"""The older trainer's configuration: a YAML of three sections (model, data, train) and overrides.

In: a path and `--dot.path=value` words. Out: a `HyperTrainerConfig` whose every key acts, or one ConfigError.
"""

from __future__ import annotations

from hp_config._legacy.reader import parse_args
from hp_config._legacy.sections import HyperTrainerConfig

__all__ = ["HyperTrainerConfig", "parse_args"]
