"""Where an older run is written, and what it goes on from.

In: `train.checkpoint.{output_dir, load_path}`. Out: the run folder and the checkpoint options. A folder that holds a
run is never written over by another one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hp_protocols.errors import ConfigError, Fault
from hp_trainer.run_folder import RESOLVED

__all__ = ["RunPlace", "checkpoint_at", "choose_place"]

STEP = re.compile(r"step-(\d+)")


@dataclass(frozen=True, slots=True)
class RunPlace:
    """`occupied`: the folder that was asked for, where another run is in it."""

    folder: str
    load_step: int = -1
    initial_load_path: str | None = None
    occupied: str | None = None


def choose_place(checkpoint: Any) -> RunPlace:
    """The folder and the checkpoint of a run.

    Raises:
        ConfigError: there is nothing to load at `load_path`.
    """
    output = Path(checkpoint.output_dir)
    if checkpoint.load_path is None:
        folder = _free(output)
        return RunPlace(str(folder), occupied=str(output) if folder != output else None)
    source = checkpoint_at(Path(checkpoint.load_path))
    step = int(STEP.fullmatch(source.name)[1])  # type: ignore[index]
    if source.parent.parent.resolve() == output.resolve():
        named = STEP.fullmatch(Path(checkpoint.load_path).name)
        return RunPlace(str(output), load_step=step if named else -1)
    folder = _free(output)
    return RunPlace(str(folder), initial_load_path=str(source), occupied=str(output) if folder != output else None)


def _free(output: Path) -> Path:
    """The folder, or the first of folder-2, folder-3, … that holds no run."""
    candidates = (output if n == 1 else output.with_name(f"{output.name}-{n}") for n in range(1, 10_000))
    return next(path for path in candidates if not (path / RESOLVED).exists() and not (path / "checkpoint").exists())


def checkpoint_at(path: Path) -> Path:
    """`…/step-N` for a checkpoint, the folder of checkpoints, or a run's folder (its newest)."""
    if STEP.fullmatch(path.name) and path.is_dir():
        return path
    for folder in (path / "checkpoint", path):
        found = [(int(match[1]), one) for one in folder.glob("step-*") if (match := STEP.fullmatch(one.name))]
        if found:
            return max(found)[1]
    allowed = "a run's folder, its checkpoint folder, or one step-N in it"
    weights = (path / "config.json").is_file()
    hint = (
        "a folder of transformers belongs in model.weights_path: training starts from its weights" if weights else None
    )
    raise ConfigError(Fault("train.checkpoint.load_path", f"there is no checkpoint at {path}", allowed, hint))
