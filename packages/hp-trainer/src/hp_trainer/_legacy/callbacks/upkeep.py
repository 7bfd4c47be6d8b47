"""MemoryMonitorCallback and GarbageCallback: what a run holds, and when Python's garbage goes.

In: steps. Out: log lines with peaks in GiB; collections at fixed steps, on all ranks at the same one.
"""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING

from hp_components.metrics.memory import host_memory_gib, reset_device_peak
from hp_protocols.errors import ConfigError, Fault
from hp_trainer._legacy.callbacks.base import Callback
from hp_trainer.environment import GarbageSchedule

if TYPE_CHECKING:
    from hp_trainer._legacy.llm_trainer import LLMTrainer
    from hp_trainer.training_step import StepResult

__all__ = ["GarbageCallback", "MemoryMonitorCallback"]

logger = logging.getLogger(__name__)


class MemoryMonitorCallback(Callback):
    """`memory_monitor`: every `log_steps` the peaks of the device and of this process.

    The device's is that since training began, with `reset_peak_each_step` that of the last step. It must come before
    LoggingCallback, which resets the device's only counter when it writes a record.
    """

    def __init__(self, trainer: LLMTrainer) -> None:
        self.section = trainer.args.train.memory_monitor
        self.peaks: dict[str, float] = {}
        self._device: int | None = None
        if self.section.reset_peak_each_step and trainer.environment.platform.max_memory() is None:
            where = "train.memory_monitor.reset_peak_each_step"
            problem = "is for accelerators: the peak of a process on the cpu cannot be reset"
            raise ConfigError(Fault(where, problem, allowed="false"))

    def on_step_begin(self, trainer: LLMTrainer) -> None:
        if self.section.reset_peak_each_step:
            # Not of the platform itself: the records' memory_gib is the peak of all steps since the last record.
            reset_device_peak()
            self._device = None

    def on_step_end(self, trainer: LLMTrainer, result: StepResult) -> None:
        peak = trainer.environment.platform.max_memory()
        if peak is not None:
            self._device = max(self._device or 0, peak)
        if trainer.state.step % self.section.log_steps:
            return
        device = {} if self._device is None else {"device": self._device / 2**30}
        self.peaks = {"host": host_memory_gib()} | device
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
