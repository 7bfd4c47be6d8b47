"""The hooks of the older trainer. In: the trainer, at each moment of a run. Out: whatever a subclass does then."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hp_trainer._legacy.llm_trainer import LLMTrainer
    from hp_trainer.training_step import StepResult

__all__ = ["Callback"]


class Callback:
    """Override what is needed. Hooks are called on every rank, in the order of the callbacks; one that communicates
    must do so on all of them.

    The trainer's `state.step` counts optimizer steps done: within a step, those before it.
    """

    def on_init_end(self, trainer: LLMTrainer) -> None:
        """Everything is built and the run folder is taken; nothing else is written yet."""

    def on_train_begin(self, trainer: LLMTrainer) -> None:
        """The first step follows; from now on files are written."""

    def on_train_end(self, trainer: LLMTrainer) -> None:
        """The last step is done, or the data have ended, or a signal asked to stop (`trainer.reason`)."""

    def on_epoch_begin(self, trainer: LLMTrainer) -> None:
        """A pass over the data begins (`trainer.epoch`, from 0), or is gone on with."""

    def on_epoch_end(self, trainer: LLMTrainer) -> None:
        """It is done, or training ends within it."""

    def on_step_begin(self, trainer: LLMTrainer) -> None:
        """The batches of a step are there."""

    def on_substep_end(self, trainer: LLMTrainer) -> None:
        """One micro-batch has been through forward and backward."""

    def on_pre_optimizer_step(self, trainer: LLMTrainer) -> None:
        """All gradients of the step are there, not clipped yet."""

    def on_step_end(self, trainer: LLMTrainer, result: StepResult) -> None:
        """The step is done and counted. `trainer.local_loss` is the loss of this rank's own tokens, 0 without any."""

    def on_log(self, trainer: LLMTrainer, logs: dict[str, float]) -> None:
        """A log step: loss, grad_norm, lr, tokens and what else is reported."""

    def on_evaluate(self, trainer: LLMTrainer, metrics: dict[str, float]) -> None:
        """The evaluation set has been measured: nll, perplexity, tokens."""

    def on_save(self, trainer: LLMTrainer, path: Path) -> None:
        """A checkpoint of this step is on disk, or on its way in the background."""

    def on_load(self, trainer: LLMTrainer, path: Path) -> None:
        """Weights, or a whole state, have been loaded from there."""

    def around_steps(self, trainer: LLMTrainer) -> contextlib.AbstractContextManager[object]:
        """Entered before the first step, left after the last one or an error."""
        return contextlib.nullcontext()

    def close(self, trainer: LLMTrainer) -> None:
        """Let go of everything; called once at the end of `train`, also after an error."""
