"""HyperTrainer and the `hp` command: train language models from one CPU to clusters.

In: a recipe (a function that returns a `HyperTrainer.Config`) and command-line options. Out: a run folder with
checkpoints, metrics and the resolved configuration. `import hp_trainer` does not import torch.
"""

from __future__ import annotations

from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hp_config import HyperTrainerConfig, parse_args
    from hp_trainer._legacy import Callback, LLMTrainer
    from hp_trainer.base_trainer import TrainResult
    from hp_trainer.faults import RankFailure
    from hp_trainer.hyper_trainer import HyperTrainer
    from hp_trainer.launch import Launch

_EXPORTS = {
    "Callback": "hp_trainer._legacy",
    "HyperTrainer": "hp_trainer.hyper_trainer",
    "HyperTrainerConfig": "hp_config",
    "LLMTrainer": "hp_trainer._legacy",
    "Launch": "hp_trainer.launch",
    "RankFailure": "hp_trainer.faults",
    "TrainResult": "hp_trainer.base_trainer",
    "parse_args": "hp_config",
}

__all__ = [
    "Callback",
    "HyperTrainer",
    "HyperTrainerConfig",
    "LLMTrainer",
    "Launch",
    "RankFailure",
    "TrainResult",
    "__version__",
    "parse_args",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return metadata.version("hp-trainer")
    if name in _EXPORTS:
        return getattr(import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
