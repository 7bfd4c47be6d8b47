"""Saving and resuming: whole checkpoints or none, whatever happens during a save.

In: the run folder, the model, the optimizers and everything else with a state. Out: `<run>/checkpoint/step-N`,
each one root of torch.distributed.checkpoint, and the way back from it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hp_components.checkpoint.errors import CheckpointError
    from hp_components.checkpoint.folder import CheckpointInfo, list_checkpoints
    from hp_components.checkpoint.lock import RunLock
    from hp_components.checkpoint.manager import CheckpointManager
    from hp_components.checkpoint.storage import load_model

__all__ = ["CheckpointError", "CheckpointInfo", "CheckpointManager", "RunLock", "list_checkpoints", "load_model"]

# Looking at folders and locks needs no torch; only saving and loading does.
_HOME = {
    "CheckpointError": "errors",
    "CheckpointInfo": "folder",
    "CheckpointManager": "manager",
    "RunLock": "lock",
    "list_checkpoints": "folder",
    "load_model": "storage",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
