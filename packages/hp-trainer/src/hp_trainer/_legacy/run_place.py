"""Where an older run is written, and what it goes on from.

In: `train.checkpoint.{output_dir, load_path}`. Out: the run folder and the checkpoint options. A folder that holds a
run is never written over by another one, also where both start together: `hold_place` decides under the folder's lock.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hp_components.checkpoint.lock import FolderInUse
from hp_protocols.errors import ConfigError, Fault
from hp_trainer.run_folder import RESOLVED, RunFolder

__all__ = ["STEP", "RunPlace", "checkpoint_at", "choose_place", "hold_place"]

STEP = re.compile(r"step-(\d+)")


@dataclass(frozen=True, slots=True)
class RunPlace:
    """`resumes`: goes on with the run in `folder`; `occupied`: the folder that was asked for, where another run is."""

    folder: str
    load_step: int = -1
    initial_load_path: str | None = None
    resumes: bool = False
    occupied: str | None = None


def choose_place(checkpoint: Any) -> RunPlace:
    """The folder and the checkpoint of a run, by looking only.

    Raises:
        ConfigError: there is nothing to load at `load_path`.
    """
    output, source = Path(checkpoint.output_dir), None
    if checkpoint.load_path is not None:
        source = checkpoint_at(Path(checkpoint.load_path))
        if source.parent.parent.resolve() == output.resolve():
            named = STEP.fullmatch(Path(checkpoint.load_path).name)
            return RunPlace(str(output), load_step=int(named[1]) if named else -1, resumes=True)
    return _new_run(next(path for path in _names(output) if not _holds_run(path)), output, source)


def hold_place(checkpoint: Any) -> tuple[RunPlace, RunFolder]:
    """The same, and the folder held for this run: nobody else writes there from now on.

    Raises:
        ConfigError: also where the run to go on with is still being trained, or the folder cannot be used.
    """
    place = choose_place(checkpoint)
    if place.resumes:
        folder = _usable(place.folder)
        folder.open()
        return place, folder
    output, source = Path(checkpoint.output_dir), place.initial_load_path
    for path in _names(output):
        if _holds_run(path):
            continue
        folder = _usable(str(path))
        try:
            folder.open()
        except FolderInUse:
            continue
        # A run that was quicker may have been here, from beginning to end.
        if not _holds_run(path):
            return _new_run(path, output, source), folder
        folder.close()
    raise ConfigError(Fault("train.checkpoint.output_dir", f"{output} and {MOST_NAMES} more hold runs"))


def _usable(path: str) -> RunFolder:
    folder = RunFolder(Path(path))
    folder.require_usable()
    return folder


def _new_run(folder: Path, output: Path, source: Path | str | None) -> RunPlace:
    initial, occupied = None if source is None else str(source), str(output) if folder != output else None
    return RunPlace(str(folder), initial_load_path=initial, occupied=occupied)


MOST_NAMES = 10_000


def _names(output: Path) -> Iterator[Path]:
    """The folder, then folder-2, folder-3, …"""
    return (output if n == 1 else output.with_name(f"{output.name}-{n}") for n in range(1, MOST_NAMES))


def _holds_run(folder: Path) -> bool:
    return (folder / RESOLVED).exists() or (folder / "checkpoint").exists()


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
