"""The run's curves for TensorBoard: one event file per start of the run, which together make one curve.

In: records. Out: event files in a folder; `tensorboard --logdir` shows them. Needs the extra `tensorboard`.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

__all__ = ["TensorBoardWriter"]

logger = logging.getLogger(__name__)

# Often enough to watch a run; the thread that writes costs nothing in between.
_FLUSH_SECONDS = 10
_QUEUE = 1000


class TensorBoardWriter:
    """Writes scalars with the names of `metrics.jsonl`. Losing the disk costs curves, never the run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._writer: Any = None

    def open(self, step: int, config: Mapping[str, Any] | None) -> None:
        """Go on after `step`: TensorBoard hides what an earlier start of the run has written for later steps."""
        self._wait_for_a_later_name()
        self._start(step)
        if config is not None:
            from torch.utils.tensorboard.summary import text

            shown = "```json\n" + json.dumps(config, indent=2, ensure_ascii=False, default=str) + "\n```"
            self._writer.add_summary(text("config", shown), step)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add a point to each of these curves."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        points = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        try:
            if self._writer is None:
                self._start(step - 1)
            # One event for all curves: a tenth of the time that a call for each would take.
            self._writer.add_summary(Summary(value=points), step)
        except OSError as error:
            self._give_up(step, error)

    def flush(self) -> None:
        """Put everything on disk: a checkpoint is about to claim that it has happened."""
        if self._writer is not None:
            try:
                self._writer.flush()
            except OSError as error:
                self._give_up(None, error)

    def close(self) -> None:
        """Write the rest and close the file."""
        if self._writer is not None:
            try:
                self._writer.close()
            except OSError as error:
                self._give_up(None, error)
            self._writer = None

    def _wait_for_a_later_name(self) -> None:
        """TensorBoard reads a run's files in the order of their names, which begin with the second they were made."""
        newest = max((path.name for path in self.folder.glob("events.out.tfevents.*")), default="")
        now = f"events.out.tfevents.{int(time.time()):010d}"
        if newest < now:
            return
        time.sleep(1)
        if newest >= f"events.out.tfevents.{int(time.time()):010d}":
            logger.warning(
                "%s: the clock of this machine is behind that of the run's earlier part; TensorBoard may show the "
                "steps that were cut off there",
                self.folder / newest,
            )

    def _start(self, step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from torch.utils.tensorboard import FileWriter

        self._writer = FileWriter(str(self.folder), max_queue=_QUEUE, flush_secs=_FLUSH_SECONDS)
        # TensorBoard drops what earlier files hold from this step on.
        self._writer.add_event(Event(session_log=SessionLog(status=SessionLog.START)), step + 1)

    def _give_up(self, step: int | None, error: OSError) -> None:
        what = "records" if step is None else f"the record of step {step}"
        logger.error("%s: %s could not be written (%s); the next record starts a new file", self.folder, what, error)
        # The thread behind it has ended with the same error, which has just been told.
        with suppress(OSError):
            self._writer.close()
        self._writer = None
