"""The parts of a training run, each built from its own Config: optimizer, schedule, loss, data, checkpoint, metrics.

In: configs and the runtime objects each part works on (model, tokenizer, run folder). Out: the parts, ready to
use. Names below are imported on first use, so that importing this package loads neither torch nor matplotlib.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hp_components.checkpoint import CheckpointError, CheckpointManager, RunLock
    from hp_components.data import (
        BaseDataLoader,
        ChatDataLoader,
        DummyDataLoader,
        HuggingFaceTextDataLoader,
        TextDataLoader,
    )
    from hp_components.loss import BaseLoss, CrossEntropyLoss
    from hp_components.loss_chunked import ChunkedCELoss
    from hp_components.lr_scheduler import LRSchedulersContainer
    from hp_components.metrics import MetricsProcessor
    from hp_components.optimizer import OptimizersContainer
    from hp_components.optimizer_groups import ParamGroupConfig
    from hp_components.optimizer_in_backward import OptimizersInBackwardContainer
    from hp_components.profiler import Profiler
    from hp_components.tokenizer import BaseTokenizer, CorpusTokenizer, HuggingFaceTokenizer

__all__ = [
    "BaseDataLoader",
    "BaseLoss",
    "BaseTokenizer",
    "ChatDataLoader",
    "CheckpointError",
    "CheckpointManager",
    "ChunkedCELoss",
    "CorpusTokenizer",
    "CrossEntropyLoss",
    "DummyDataLoader",
    "HuggingFaceTextDataLoader",
    "HuggingFaceTokenizer",
    "LRSchedulersContainer",
    "MetricsProcessor",
    "OptimizersContainer",
    "OptimizersInBackwardContainer",
    "ParamGroupConfig",
    "Profiler",
    "RunLock",
    "TextDataLoader",
]

_HOME = {
    "BaseDataLoader": "data",
    "BaseLoss": "loss",
    "BaseTokenizer": "tokenizer",
    "ChatDataLoader": "data",
    "CheckpointError": "checkpoint",
    "CheckpointManager": "checkpoint",
    "ChunkedCELoss": "loss_chunked",
    "CorpusTokenizer": "tokenizer",
    "CrossEntropyLoss": "loss",
    "DummyDataLoader": "data",
    "HuggingFaceTextDataLoader": "data",
    "HuggingFaceTokenizer": "tokenizer",
    "LRSchedulersContainer": "lr_scheduler",
    "MetricsProcessor": "metrics",
    "OptimizersContainer": "optimizer",
    "OptimizersInBackwardContainer": "optimizer_in_backward",
    "ParamGroupConfig": "optimizer_groups",
    "Profiler": "profiler",
    "RunLock": "checkpoint",
    "TextDataLoader": "data",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("hp-components")
    if name in _HOME:
        value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
