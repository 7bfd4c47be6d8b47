"""One save: everything on one line in time, then on disk, then under its name.

In: a `RunState` and a step. Out: `step-N` in the folder of checkpoints. `prepare` looks at (or copies) the live state
and must be over before training goes on; `upload` may run in a thread beside it, if the state was copied.
"""

from __future__ import annotations

import logging
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter

from hp_components.checkpoint import folder as folders
from hp_components.checkpoint.agreement import on_all_ranks, on_rank_zero
from hp_components.checkpoint.background import Background
from hp_components.checkpoint.plan import PlanCache, WritePlan, layout_of
from hp_components.checkpoint.run_state import RunState, drop_repeated_hyperparameters
from hp_components.checkpoint.staging import Stage, StagedPieces
from hp_components.checkpoint.storage import write, writer_of
from hp_protocols.platform import get_platform

__all__ = ["Saver", "Upload"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Upload:
    """A save that is planned and only needs to be written.

    Attributes:
        pieces: finds the data of this rank's pieces: the live ones, or a copy.
        about: what the checkpoint's marker says.
    """

    step: int
    partial: Path
    token: str
    plan: WritePlan
    pieces: DefaultSavePlanner
    writer: FileSystemWriter
    about: dict[str, Any]


class Saver:
    """Saves into one folder.

    Args:
        keep: how many own checkpoints to keep; 0 keeps all.
        group: the ranks that save together.
    """

    def __init__(self, folder: Path, state: RunState, keep: int, group: dist.ProcessGroup | None) -> None:
        self.folder = folder
        self.state = state
        self.keep = keep
        self.group = group
        self._plans = PlanCache(group)
        self._deletion: Background[None] | None = None

    def prepare(self, step: int, stage: Stage | None = None, weights: torch.dtype | None = None) -> Upload:
        """Plan the save of this moment. Collective.

        Args:
            stage: where to copy the state to; None leaves it where it is, and `upload` must come at once.
            weights: save the weights alone, as this type.

        Raises:
            CheckpointError: it cannot be made; nothing is left over.
        """
        partial, token = on_rank_zero(f"make a folder in {self.folder}", lambda: self._begin(step), self.group)
        try:
            tree = on_all_ranks("collect the state", lambda: self._collect(partial, weights), self.group)
            drop_repeated_hyperparameters(tree, self.group)
            # The weights alone are saved once: no plan to keep, and none that fits.
            plans = self._plans if weights is None else PlanCache(self.group)
            layout = layout_of(tree)
            known = all(get_platform().all_gather_object(plans.knows(layout), self.group))
            writer = writer_of(partial)
            plan, pieces = plans.plan(tree, writer, layout, known=known)
            if stage is not None:
                pieces = on_all_ranks("copy the state", lambda: stage.copy(plan.local, pieces), self.group)
        except Exception:  # every rank is here: what fails in a stage fails on all of them
            self._discard(partial)
            raise
        about = {"step": step, "world_size": get_platform().world_size(), "model_only": weights is not None}
        return Upload(step, partial, token, plan, pieces, writer, about)

    def upload(self, upload: Upload) -> Path:
        """Write it and give it its name. Collective, over the group only.

        Raises:
            CheckpointError: it could not be written; nothing is left over.
        """
        try:
            if isinstance(upload.pieces, StagedPieces):
                upload.pieces.wait()
            write(upload.plan, upload.pieces, upload.writer, self.group)
            return on_rank_zero(f"finish step-{upload.step}", lambda: self._publish(upload), self.group)
        except Exception:
            self._discard(upload.partial)
            raise

    def close(self) -> None:
        """Wait until older checkpoints are deleted."""
        if self._deletion is not None:
            self._deletion.result()
            self._deletion = None

    def _begin(self, step: int) -> tuple[Path, str]:
        token = secrets.token_hex(4)
        partial = folders.partial_folder(self.folder, f"step-{step}", token)
        partial.mkdir(parents=True)
        return partial, token

    def _collect(self, partial: Path, weights: torch.dtype | None) -> dict[str, dict[str, Any]]:
        if not partial.is_dir():
            raise FileNotFoundError(
                f"rank 0 made {partial}, but this rank does not see it: checkpoints need a folder that all hosts share"
            )
        if weights is None:
            return self.state.everything()
        model = self.state.tensors(exclude=("optimizer",))["model"]
        return {"model": {name: as_type(value, weights) for name, value in model.items()}}

    def _publish(self, upload: Upload) -> Path:
        path = folders.publish(upload.partial, f"step-{upload.step}", upload.token, upload.about)
        self.close()
        try:
            retired = folders.retire(self.folder, self.keep, upload.step, upload.token)
        except OSError as error:
            # The new checkpoint is safe; an old one too many is no reason to call it failed.
            self._tell_undeleted(upload.step, error)
            return path
        if retired:
            # Large folders take seconds to delete, for which no step should wait.
            self._deletion = Background(lambda: self._delete(retired, upload.step), "hp-checkpoint-deletion")
        return path

    def _delete(self, retired: list[Path], step: int) -> None:
        try:
            folders.delete(retired)
        except OSError as error:
            self._tell_undeleted(step, error)

    @staticmethod
    def _tell_undeleted(step: int, error: OSError) -> None:
        logger.error("checkpoint step-%d is saved, but older ones could not be deleted: %s", step, error)

    def _discard(self, partial: Path) -> None:
        def remove() -> None:
            try:
                folders.discard(partial)
            except OSError as error:
                logger.error(
                    "%s: could not be removed after the failed save (%s); the next start removes it", partial, error
                )

        on_rank_zero(f"remove {partial}", remove, self.group)


def as_type(value: Any, dtype: torch.dtype) -> Any:
    """A floating-point tensor as `dtype`; everything else as it is."""
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
