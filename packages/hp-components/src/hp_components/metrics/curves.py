"""Where curves go besides `metrics.jsonl`. In: the metrics' config. Out: the writers that it asks for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from hp_components.metrics.tensorboard import TensorBoardWriter
from hp_components.metrics.wandb_run import WandbWriter

if TYPE_CHECKING:
    from hp_components.metrics.processor import MetricsProcessor

__all__ = ["CurveWriter", "make_curve_writers"]


class CurveWriter(Protocol):
    """Something that shows records as curves. Losing it costs curves, never the run."""

    def open(self, step: int, config: Mapping[str, Any] | None) -> None:
        """Go on after `step`; `config` is the run's resolved configuration."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add a point to each of these curves."""

    def flush(self) -> None:
        """Make durable what was written."""

    def close(self) -> None:
        """No more records come."""


def make_curve_writers(config: MetricsProcessor.Config, run_folder: Path, rank: int) -> list[CurveWriter]:
    """The writers of this rank."""
    writers: list[CurveWriter] = []
    own_rank = rank if config.save_for_all_ranks else None
    if config.enable_tensorboard:
        folder = run_folder / config.save_tb_folder
        writers.append(TensorBoardWriter(folder if own_rank is None else folder / f"rank_{own_rank}"))
    if config.enable_wandb:
        writers.append(WandbWriter(run_folder, run_folder.absolute().name, own_rank))
    return writers
