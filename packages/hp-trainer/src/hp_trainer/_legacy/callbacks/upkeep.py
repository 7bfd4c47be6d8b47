"""MemoryMonitorCallback and GarbageCallback: what a run holds, and when Python's garbage goes.

In: steps. Out: log lines with peaks in GiB; collections at fixed steps, on all ranks at the same one.
"""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING

from hp_components.metrics.memory import host_memory_gib
from hp_protocols.errors import ConfigError, Fault
from hp_trainer._legacy.callbacks.base import Callback
from hp_trainer.environment import GarbageSchedule

if TYPE_CHECKING:
    from hp_trainer._legacy.llm_trainer import LLMTrainer
    from hp_trainer.training_step import StepResult

__all__ = ["GarbageCallback", "MemoryMonitorCallback"]

logger = logging.getLogger(__name__)


class MemoryMonitorCallback(Callback):
    """`memory_monitor`: the peaks every `log_steps`, of the device and of this process.

    With `reset_peak_each_step` the device's peak is that of the last step.
    """

    def __init__(self, trainer: LLMTrainer) -> None:
        self.section = trainer.args.train.memory_monitor
        self.peaks: dict[str, float] = {}
        if self.section.reset_peak_each_step and trainer.environment.platform.max_memory() is None:
            where = "train.memory_monitor.reset_peak_each_step"
            problem = "is for accelerators: the peak of a process on the cpu cannot be reset"
            raise ConfigError(Fault(where, problem, allowed="false"))

    def on_step_begin(self, trainer: LLMTrainer) -> None:
        if self.section.reset_peak_each_step:
            trainer.environment.platform.reset_max_memory()

    def on_step_end(self, trainer: LLMTrainer, result: StepResult) -> None:
        if trainer.state.step % self.section.log_steps:
            return
        device = trainer.environment.platform.max_memory()
        self.peaks = {"host": host_memory_gib()} | ({} if device is None else {"device": device / 2**30})
        shown = ", ".join(f"{name} {peak:.2f} GiB" for name, peak in self.peaks.items())
        logger.info("step %d: peak memory of rank %d: %s", trainer.state.step, trainer.environment.rank, shown)


class GarbageCallback(Callback):
    """`debug.gc_steps`: Python's garbage is collected every so many steps and at no other time."""

    def __init__(self, every: int) -> None:
        self.schedule = GarbageSchedule(every)

    def around_steps(self, trainer: LLMTrainer) -> contextlib.AbstractContextManager[object]:
        return self.schedule

    def on_step_end(self, trainer: LLMTrainer, result: StepResult) -> None:
        self.schedule.after_step(trainer.state.step)
