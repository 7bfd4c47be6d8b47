"""What every trainer does alike: build as a list of steps, train step by step until the end, let go of everything.

In: a subclass's build steps and what it does around a step. Out: `build()`, `train()`, `close()`.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hp_trainer.signals import StopRequest

if TYPE_CHECKING:
    from hp_components import BaseDataLoader
    from hp_trainer.environment import Environment
    from hp_trainer.run_folder import RunFolder
    from hp_trainer.train_state import TrainState
    from hp_trainer.training_step import StepResult, TrainingStep

__all__ = ["BaseTrainer", "TrainResult"]


@dataclass(frozen=True, slots=True)
class TrainResult:
    """How a run ended: `reason` is finished, already_finished, data_exhausted, or the name of a signal."""

    step: int
    reason: str
    run_folder: Path
    saved: bool


class BaseTrainer(ABC):
    """A run on every rank. Its build steps make the parts that are declared here; building writes nothing yet."""

    environment: Environment
    run_folder: RunFolder
    state: TrainState
    first_step: int
    dataloader: BaseDataLoader
    training_step: TrainingStep

    @abstractmethod
    def build_steps(self) -> list[Callable[[], None]]:
        """What building a run consists of, in order."""

    @property
    @abstractmethod
    def total_steps(self) -> int:
        """The step after which the run is finished."""

    @abstractmethod
    def begin(self) -> None:
        """Called once before the first step: from here on files are written."""

    @abstractmethod
    def after_step(self, result: StepResult) -> None:
        """Called after each step, which is counted already."""

    @abstractmethod
    def finish(self, reason: str) -> TrainResult:
        """Called after the last step, while signals are still only noted."""

    @abstractmethod
    def release(self) -> None:
        """Called at the end of `train`, also after an error."""

    def around_steps(self) -> contextlib.AbstractContextManager[object]:
        """What is entered for the training loop and left before `finish`."""
        return contextlib.nullcontext()

    def before_step(self) -> None:  # noqa: B027 (there is nothing to do unless a subclass has something)
        """Called when the batches of a step are there and all ranks have agreed to do it."""

    def before_fetch(self) -> None:  # noqa: B027
        """Called before the batches of a step are fetched."""

    def build(self) -> None:
        """Run the build steps; if one fails, let go of what was taken before it."""
        try:
            for step in self.build_steps():
                step()
        except BaseException:
            self.close()
            raise

    def train(self) -> TrainResult:
        """Train to `total_steps` in all, or until the data ends or a signal asks to stop.

        Raises:
            CheckpointError: the last save failed; older checkpoints are intact.
        """
        if self.state.step >= self.total_steps:
            return TrainResult(self.state.step, "already_finished", self.run_folder.path, saved=True)
        self.begin()
        try:
            with StopRequest() as stop:
                with self.around_steps():
                    reason = self.run_steps(stop)
                # Saved inside: a second SIGTERM must not interrupt the save that the first has asked for.
                return self.finish(reason)
        finally:
            self.release()
            self.run_folder.close()

    def run_steps(self, stop: StopRequest) -> str:
        """The training loop; returns why it ended."""
        batches = iter(self.dataloader)
        while self.state.step < self.total_steps:
            self.before_fetch()
            fetched = self.training_step.fetch(batches)
            agreed = self.training_step.agree(fetched, stop_wanted=stop.name is not None)
            if fetched is None:
                return "data_exhausted"
            self.before_step()
            result = self.training_step.run(fetched, agreed.valid_tokens)
            self.state.step += 1
            self.state.tokens_seen += result.tokens
            self.after_step(result)
            # Only now: the batch that was fetched counts as seen.
            if agreed.stop_wanted:
                return stop.name or "a signal to another rank"
        return "finished"

    def on_main(self, work: Callable[[], None]) -> None:
        """Do something on rank 0 alone; its faults are raised on every rank."""
        self.environment.agree(lambda: work() if self.environment.is_main else None)

    def close(self) -> None:
        """Let go of the run folder and leave the process group. The trainer is of no use afterwards."""
        if hasattr(self, "run_folder"):
            self.run_folder.close()
        if hasattr(self, "environment"):
            self.environment.platform.destroy_process_group()
