"""The run's curves for Weights & Biases: one W&B run, however often training is resumed.

In: records. Out: a W&B run, online or offline as W&B's own settings say (`WANDB_MODE`); its id is kept in the run
folder. Needs the extra `wandb`.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hp_protocols.errors import ConfigError, Fault

__all__ = ["WandbWriter"]

logger = logging.getLogger(__name__)

DEFAULT_PROJECT = "hyper-parallel"


@dataclass(frozen=True, slots=True)
class _Kept:
    """What a resumed run must know: which W&B run it goes on with, and the last step that it has sent there."""

    run_id: str
    last_step: int


class WandbWriter:
    """Sends records to W&B. What W&B's variables say (WANDB_PROJECT, WANDB_NAME, WANDB_RUN_ID, …) comes first.

    W&B takes no record back: its steps only rise, and offline there is nobody to ask. A run that resumes from an older
    step therefore sends nothing again: the steps that W&B has already stay as they were sent first (a resumed run
    repeats them to the bit, unless its options were changed), and a log line names them.
    """

    def __init__(self, run_folder: Path, name: str, rank: int | None) -> None:
        """
        Args:
            run_folder: W&B's files go to its subfolder `wandb`.
            name: shown by W&B, unless WANDB_NAME is set.
            rank: None if one rank reports for all; else this rank gets a W&B run of its own, in a common group.
        """
        self._run_folder = run_folder
        self._name = name
        self._rank = rank
        suffix = "" if rank is None else f"-rank-{rank}"
        self._state_file = run_folder / "wandb" / f"hp-run{suffix}.json"
        self._kept = _Kept("", 0)
        self._known_step = 0  # the last step that W&B had as this start of the run began
        self._run: Any = None

    def open(self, step: int, config: Mapping[str, Any] | None) -> None:
        """Start the W&B run, or go on with the one that this run folder knows.

        Raises:
            ConfigError: W&B cannot start, for instance because nobody is logged in.
        """
        import wandb

        self._kept = self._recall()
        self._known_step = self._kept.last_step
        if self._kept.last_step > step:
            logger.info(
                "W&B has steps %d to %d already, from before the interruption; they stay as they were sent first",
                step + 1,
                self._kept.last_step,
            )
        self._state_file.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._run = wandb.init(
                dir=str(self._run_folder),
                id=self._kept.run_id,
                resume="allow",
                config=dict(config) if config is not None else None,
                **self._names(),
            )
        except wandb.Error as error:
            hint = "`wandb login`, or WANDB_MODE=offline to keep the records here and send them later (`wandb sync`)"
            raise ConfigError(Fault("metrics.enable_wandb", f"W&B does not start: {error}", hint=hint)) from error
        self._keep(self._kept)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Send a point of each of these curves, unless W&B has this step."""
        if step <= self._known_step:
            return
        import wandb

        try:
            self._run.log(dict(values), step=step)
        except wandb.Error as error:
            logger.error("W&B: the record of step %d could not be sent: %s", step, error)
            return
        self._keep(_Kept(self._kept.run_id, step))

    def flush(self) -> None:
        """W&B's own process has the records already."""

    def close(self) -> None:
        """End this part of the W&B run; it can be gone on with."""
        if self._run is not None:
            self._run.finish()
            self._run = None

    def _names(self) -> dict[str, Any]:
        """What W&B's own variables leave open."""
        names: dict[str, Any] = {"project": os.environ.get("WANDB_PROJECT", DEFAULT_PROJECT)}
        if "WANDB_NAME" not in os.environ:
            names["name"] = self._name if self._rank is None else f"{self._name}-rank-{self._rank}"
        if self._rank is not None and "WANDB_RUN_GROUP" not in os.environ:
            names["group"] = self._name
        if "WANDB_CONSOLE" not in os.environ:
            import wandb

            # W&B would put streams of its own in the place of those that the progress bar draws on.
            names["settings"] = wandb.Settings(console="off")
        return names

    def _recall(self) -> _Kept:
        asked = os.environ.get("WANDB_RUN_ID") if self._rank is None else None
        try:
            found = json.loads(self._state_file.read_text())
            kept = _Kept(str(found["run_id"]), int(found["last_step"]))
        except FileNotFoundError:
            return _Kept(asked or secrets.token_hex(4), 0)
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                Fault(
                    str(self._state_file),
                    f"does not say which W&B run this is: {error!r}",
                    hint="delete the file to start a new W&B run, or put the id into WANDB_RUN_ID as well",
                )
            ) from error
        if asked is not None and asked != kept.run_id:
            logger.info("WANDB_RUN_ID=%s takes the place of the W&B run %s of this run folder", asked, kept.run_id)
            return _Kept(asked, 0)
        return kept

    def _keep(self, kept: _Kept) -> None:
        self._kept = kept
        partial = self._state_file.with_suffix(".partial")
        try:
            partial.write_text(json.dumps({"run_id": kept.run_id, "last_step": kept.last_step}))
            os.replace(partial, self._state_file)
        except OSError as error:
            logger.error("%s could not be written: %s", self._state_file, error)
