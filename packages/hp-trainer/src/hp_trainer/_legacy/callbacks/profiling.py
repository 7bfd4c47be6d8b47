"""ProfilerCallback: one trace per rank. In: `train.profile`. Out: files in its `output_dir`."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from hp_trainer._legacy.callbacks.base import Callback

if TYPE_CHECKING:
    from hp_components import Profiler
    from hp_trainer._legacy.llm_trainer import LLMTrainer
    from hp_trainer.training_step import StepResult

__all__ = ["ProfilerCallback"]


class ProfilerCallback(Callback):
    """Waits `wait_steps`, warms up `warmup_steps`, records `active_steps`, once."""

    def __init__(self, trainer: LLMTrainer) -> None:
        folder = Path(trainer.args.train.profile.output_dir).absolute()
        config = trainer.sections.profiler.replace(save_traces_folder=folder.name)
        self.profiler: Profiler = config.build(run_folder=folder.parent, rank=trainer.environment.rank)

    def around_steps(self, trainer: LLMTrainer) -> contextlib.AbstractContextManager[object]:
        return self.profiler.active(trainer.state.step)

    def on_step_end(self, trainer: LLMTrainer, result: StepResult) -> None:
        self.profiler.step()
