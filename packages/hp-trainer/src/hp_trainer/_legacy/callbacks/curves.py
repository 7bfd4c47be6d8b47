"""TensorBoardCallback and WandbCallback: the same curves for both.

In: the results of steps, evaluations. Out: event files in `tensorboard.output_dir`; a W&B run.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hp_components.metrics.tensorboard import TensorBoardWriter
from hp_components.metrics.wandb_run import WandbWriter
from hp_trainer._legacy.callbacks.base import Callback

if TYPE_CHECKING:
    from hp_components.metrics.curves import CurveWriter
    from hp_trainer._legacy.llm_trainer import LLMTrainer
    from hp_trainer.training_step import StepResult

__all__ = ["CurvesCallback", "TensorBoardCallback", "WandbCallback"]


class CurvesCallback(Callback):
    """Writes loss (the mean over all ranks), grad_norm and lr every `log_steps`, from rank 0."""

    def __init__(self, writer: CurveWriter, log_steps: int) -> None:
        self.writer, self.log_steps = writer, log_steps
        self._open = False

    def on_train_begin(self, trainer: LLMTrainer) -> None:
        def open_writer() -> None:
            self.writer.open(trainer.state.step, _plain(trainer))
            self._open = True

        # It may refuse to start, on the rank that reports.
        trainer.on_main(open_writer)

    def on_step_end(self, trainer: LLMTrainer, result: StepResult) -> None:
        step = trainer.state.step
        if self._open and (step % self.log_steps == 0 or step == trainer.total_steps):
            values = {"loss": result.loss, "lr": result.lr, "tokens": float(trainer.state.tokens_seen)}
            if result.grad_norm is not None:
                values["grad_norm"] = result.grad_norm
            self.writer.write(step, values)

    def on_evaluate(self, trainer: LLMTrainer, metrics: dict[str, float]) -> None:
        if self._open:
            self.writer.write(trainer.state.step, {f"eval/{name}": value for name, value in metrics.items()})

    def on_save(self, trainer: LLMTrainer, path: Path) -> None:
        if self._open:
            self.writer.flush()

    def close(self, trainer: LLMTrainer) -> None:
        if self._open:
            self._open = False
            self.writer.close()


class TensorBoardCallback(CurvesCallback):
    """`train.tensorboard`."""

    def __init__(self, trainer: LLMTrainer) -> None:
        section = trainer.args.train.tensorboard
        super().__init__(TensorBoardWriter(Path(section.output_dir)), section.log_steps)


class WandbCallback(CurvesCallback):
    """`train.wandb`: `project` and `run_name` are what W&B's own variables leave open."""

    def __init__(self, trainer: LLMTrainer) -> None:
        section = trainer.args.train.wandb
        self.project = section.project
        name = section.run_name or trainer.run_folder.path.absolute().name
        super().__init__(WandbWriter(trainer.run_folder.path, name, None), section.log_steps)

    def on_train_begin(self, trainer: LLMTrainer) -> None:
        # The writer reads the project where W&B does; another run of this process may have another.
        given = os.environ.get("WANDB_PROJECT")
        os.environ.setdefault("WANDB_PROJECT", self.project)
        try:
            super().on_train_begin(trainer)
        finally:
            if given is None:
                del os.environ["WANDB_PROJECT"]


def _plain(trainer: LLMTrainer) -> dict[str, Any]:
    return dataclasses.asdict(trainer.args)
