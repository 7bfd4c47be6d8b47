"""ProgressCallback: how far the run is, on a terminal. In: steps. Out: one line that is written over."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, TextIO

from hp_trainer._legacy.callbacks.base import Callback

if TYPE_CHECKING:
    from hp_trainer._legacy.llm_trainer import LLMTrainer
    from hp_trainer.training_step import StepResult

__all__ = ["ProgressCallback"]

WIDTH, SECONDS_BETWEEN = 30, 0.1


class ProgressCallback(Callback):
    """A bar with steps done and the time that is left; nothing where nobody watches (no terminal)."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = stream or sys.stderr
        self._shown = 0.0

    def on_train_begin(self, trainer: LLMTrainer) -> None:
        self.watched = trainer.environment.is_main and self.stream.isatty()
        self.began, self.first = time.monotonic(), trainer.state.step

    def on_step_end(self, trainer: LLMTrainer, result: StepResult) -> None:
        now, step, total = time.monotonic(), trainer.state.step, trainer.total_steps
        if not self.watched or (now - self._shown < SECONDS_BETWEEN and step != total):
            return
        self._shown = now
        done = WIDTH * step // total
        left = (now - self.began) / (step - self.first) * (total - step)
        bar = "#" * done + "." * (WIDTH - done)
        self.stream.write(f"\r[{bar}] {step}/{total}  {left:.0f} s left ")
        self.stream.flush()

    def on_log(self, trainer: LLMTrainer, logs: dict[str, float]) -> None:
        self._end_line()

    def on_train_end(self, trainer: LLMTrainer) -> None:
        self._end_line()

    def _end_line(self) -> None:
        """What others write must not begin behind the bar."""
        if self.watched and self._shown:
            self.stream.write("\r\x1b[K")
            self.stream.flush()
