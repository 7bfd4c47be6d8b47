"""What every trainer does alike: build as a list of steps, train step by step until the end, let go of everything.

In: a subclass's build steps and what it does around a step. Out: `build()`, `train()`, `close()`.
"""

from __future__ import annotations

import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hp_protocols.errors import ConfigError
from hp_trainer.faults.activity import activity
from hp_trainer.faults.failure import RankFailure
from hp_trainer.signals import StopRequest

if TYPE_CHECKING:
    from hp_components import BaseDataLoader
    from hp_trainer.environment import Environment
    from hp_trainer.run_folder import RunFolder
    from hp_trainer.train_state import TrainState
    from hp_trainer.training_step import Agreement, StepResult, TrainingStep

__all__ = ["BaseTrainer", "TrainResult", "why_skipped"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TrainResult:
    """How a run ended: `reason` is finished, already_finished, data_exhausted, or the name of a signal."""

    step: int
    reason: str
    run_folder: Path
    saved: bool


MAX_SKIPPED_IN_A_ROW = 100
"""Updates left out because loss or gradient is not finite; a run that does nothing else for so long has gone astray."""


def why_skipped(result: StepResult) -> str:
    """Why a step's update was left out, with the ranks where it began."""
    if not result.astray:
        return "the gradient norm is not finite"
    ranks = ", ".join(map(str, result.astray))
    return f"the loss is not finite on rank{'s' if len(result.astray) > 1 else ''} {ranks}"


class BaseTrainer(ABC):
    """A run on every rank. Its build steps make the parts that are declared here; building writes nothing yet."""

    environment: Environment
    run_folder: RunFolder
    state: TrainState
    first_step: int
    dataloader: BaseDataLoader
    training_step: TrainingStep
    skipped_in_a_row: int = 0

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
        """Run the build steps; if one fails, let go of what was taken before it.

        Raises:
            ConfigError: mistakes, which all ranks have agreed on.
            RankFailure: a rank died, hung or raised.
        """
        try:
            for step in self.build_steps():
                activity.now(_words(step.__name__))
                step()
        except BaseException as error:
            failure = self.explain(error)
            self.close()
            if failure is not None:
                raise failure from error
            raise
        activity.now("between building and training")
        self.watch_rests(True)

    def train(self) -> TrainResult:
        """Train to `total_steps` in all, or until the data ends or a signal asks to stop.

        Raises:
            CheckpointError: in a run of one process: the last save failed; older checkpoints are intact.
            RankFailure: in a run of several: a rank died, hung or raised; told on standard error, once.
        """
        if self.state.step >= self.total_steps:
            return TrainResult(self.state.step, "already_finished", self.run_folder.path, saved=True)
        self.watch_rests(False)
        try:
            result = self._train()
            # What comes now is no part of the run: the ranks may take their time, and end when they like.
            activity.at_step(0)
            activity.now("after training")
            self.watch_rests(True)
            return result
        except RankFailure:
            # Whoever waits for a save of this rank need not wait any more.
            self.close()
            raise

    def _train(self) -> TrainResult:
        activity.now("beginning to train")
        try:
            # From the first file on: what has begun ends with a save.
            with StopRequest() as stop:
                self.begin()
                with self.around_steps():
                    reason = self.run_steps(stop)
                # Saved inside: a second SIGTERM must not interrupt the save that the first has asked for.
                activity.now("ending the run")
                return self.finish(reason)
        except BaseException as error:
            # Before anything is let go of: the others are told while this rank may still wait for a save.
            if (failure := self.explain(error)) is not None:
                raise failure from error
            raise
        finally:
            self.release()
            self.run_folder.close()

    def run_steps(self, stop: StopRequest) -> str:
        """The training loop; returns why it ended."""
        batches = iter(self.dataloader)
        reading = "reading the first batch"
        while self.state.step < self.total_steps:
            activity.at_step(self.state.step + 1)
            self.before_fetch()
            activity.now(reading)
            reading = "waiting for data"
            fetched = self.training_step.fetch(batches)
            activity.now("agreeing with the other ranks")
            agreed = self.training_step.agree(fetched, stop_wanted=stop.name is not None)
            if fetched is None or not agreed.micro_batches:
                self.tell_uneven_end(fetched is None, agreed)
                return "data_exhausted"
            self.before_step()
            activity.now("forward and backward")
            fetched = self.training_step.even_out(fetched, agreed.micro_batches)
            result = self.training_step.run(fetched, agreed.valid_tokens)
            self.state.step += 1
            self.state.tokens_seen += result.tokens
            self.skipped_in_a_row = 0 if result.updated else self.skipped_in_a_row + 1
            if self.skipped_in_a_row == MAX_SKIPPED_IN_A_ROW:
                raise FloatingPointError(
                    f"{MAX_SKIPPED_IN_A_ROW} updates in a row were left out, the last because {why_skipped(result)}; "
                    "the weights are those of the last update. Go on from an earlier checkpoint with a lower rate"
                )
            activity.now("reporting the step")
            self.after_step(result)
            # Only now: the batch that was fetched counts as seen. A stop at the very last step is the end.
            if agreed.stop_wanted and self.state.step < self.total_steps:
                return stop.name or "a signal to another rank"
        return "finished"

    def tell_uneven_end(self, empty: bool, agreed: Agreement) -> None:
        """The data of some ranks have ended before those of the others: say whose. Collective."""
        world_size = self.environment.world_size
        if agreed.without_data == world_size:
            return
        ranks = [rank for rank, one in enumerate(self.environment.platform.all_gather_object(empty)) if one]
        if self.environment.is_main:
            logger.warning(
                "step %d: the data of rank %s have ended (%d of %d ranks); what the others have left is not trained on",
                self.state.step + 1, ", ".join(map(str, ranks)), agreed.without_data, world_size,
            )  # fmt: skip

    def watch_rests(self, rests: bool) -> None:
        """Whether this rank may be long in what it does without asking after the others."""
        if self.environment.watch is not None:
            self.environment.watch.rests = rests

    def explain(self, error: BaseException) -> RankFailure | None:
        """What a run of several processes ends with: told by now, once, and naming the rank. None: `error` says it."""
        watch = self.environment.watch if hasattr(self, "environment") else None
        if watch is None or isinstance(error, (ConfigError, RankFailure, KeyboardInterrupt)):
            return None
        return watch.explain(error)

    def on_main(self, work: Callable[[], None]) -> None:
        """Do something on rank 0 alone; its faults are raised on every rank."""
        self.environment.agree(lambda: work() if self.environment.is_main else None)

    def close(self) -> None:
        """Let go of the run folder and leave the process group. The trainer is of no use afterwards."""
        if hasattr(self, "run_folder"):
            self.run_folder.close()
        if hasattr(self, "environment"):
            if self.environment.watch is not None:
                self.environment.watch.close()
            self.environment.platform.destroy_process_group()


def _words(name: str) -> str:
    """What a build step does, in words: `build_model` is building the model."""
    verb, _, rest = name.partition("_")
    doing = verb.removesuffix("e") + "ing" if verb in _VERBS else f"building ({name})"
    return f"{doing} the {rest.replace('_', ' ')}".rstrip() if verb in _VERBS and rest else doing


_VERBS = ("start", "check", "choose", "hold", "build", "load", "freeze", "parallelise")
