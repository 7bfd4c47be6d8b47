"""What a run reports: the console, `metrics.jsonl`, `loss.png`, curves for TensorBoard and W&B.

In: one call per step with numbers already reduced over ranks. Out: a readable line per log interval, one JSON
object and one point per curve per log step, a table and a picture of the loss at the end.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hp_components.metrics.jsonl import read_records
    from hp_components.metrics.plot import plot_loss
    from hp_components.metrics.processor import MetricsProcessor
    from hp_components.metrics.record import Record
    from hp_components.metrics.text_curve import sparkline

__all__ = ["MetricsProcessor", "Record", "plot_loss", "read_records", "sparkline"]

_HOME = {
    "MetricsProcessor": "processor",
    "Record": "record",
    "plot_loss": "plot",
    "read_records": "jsonl",
    "sparkline": "text_curve",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
