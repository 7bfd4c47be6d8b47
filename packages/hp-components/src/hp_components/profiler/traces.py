"""Traces of the host's and the device's operators, at the same steps whether a run was resumed or not.

In: the options, and the step after which the run goes on. Out: `iteration_<step>/rank<rank>.pt.trace.json`, in the
chrome trace format, with one span `ProfilerStep#<step>` for each recorded training step.
"""

from __future__ import annotations

import gzip
import logging
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hp_components.profiler.options import ProfilerOptions
from hp_protocols.platform import get_platform

__all__ = ["TraceRecorder"]

logger = logging.getLogger(__name__)


class TraceRecorder:
    """torch's profiler (on an npu torch_npu's) under a schedule that counts training steps from 1."""

    def __init__(self, options: ProfilerOptions, folder: Path, rank: int, step: int) -> None:
        """
        Args:
            options: what to record when.
            folder: of the traces.
            rank: in the files' names.
            step: training steps done; the next one is `step + 1`.
        """
        self.folder = folder
        self.files: list[Path] = []
        self._gzip = options.gzip_traces
        self._rank = rank
        self._recorded = 0  # whole steps since the current recording began
        platform = get_platform()
        module = platform.profiler_module()
        self._recording = {module.ProfilerAction.RECORD, module.ProfilerAction.RECORD_AND_SAVE}
        # It is meant for those who read events from Python; each trace is written before the next cycle begins.
        warnings.filterwarnings("ignore", message=".*Profiler clears events at the end of each cycle")
        self._schedule = _from_step(_schedule(module, options), first=step + 1)
        self._profile: Any = module.profile(
            activities=platform.profiler_activities(),
            schedule=self._schedule,
            on_trace_ready=self._export,
            record_shapes=options.record_shapes,
            with_stack=options.with_stack,
            profile_memory=options.profile_memory,
        )
        # It counts from 0 by itself; its spans shall carry the numbers of the training steps.
        self._profile.step_num = step + 1
        self._profile.start()

    def step(self) -> None:
        """A training step is done."""
        if self._schedule(self._profile.step_num) in self._recording:
            self._recorded += 1
        self._profile.step()

    def close(self, *, failed: bool = False) -> None:
        """Stop; a recording that has just begun is not written, unless it holds the step that failed."""
        self._recorded += failed
        self._profile.stop()

    def _export(self, profile: Any) -> None:
        recorded, self._recorded = self._recorded, 0
        if not recorded:
            return
        # While it is stopped after a step, the profiler has counted the next one already.
        step = profile.step_num - 1 if self._schedule(profile.step_num - 1) in self._recording else profile.step_num
        target = self.folder / f"iteration_{step}" / f"rank{self._rank}.pt.trace.json"
        if self._gzip:
            target = target.with_name(target.name + ".gz")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            self._write(profile, target)
        except OSError as error:
            logger.error("the trace %s could not be written: %s", target, error)
            return
        self.files.append(target)
        logger.info("trace of %s: %s", "1 step" if recorded == 1 else f"{recorded} steps", target)

    def _write(self, profile: Any, target: Path) -> None:
        """Under a hidden name first, so that a viewer never finds half a trace. (torch_npu writes no gzip itself.)"""
        plain = target.with_name(f".rank{self._rank}.partial.json")
        packed = plain.with_name(plain.name + ".gz")
        try:
            profile.export_chrome_trace(str(plain))
            if self._gzip:
                with plain.open("rb") as source, gzip.open(packed, "wb") as out:
                    shutil.copyfileobj(source, out)
            os.replace(packed if self._gzip else plain, target)
        finally:
            plain.unlink(missing_ok=True)
            packed.unlink(missing_ok=True)


def _schedule(module: Any, options: ProfilerOptions) -> Callable[[int], Any]:
    """What to do in training step 1, 2, …: torch's own schedule, whose first step is 0."""
    chosen = module.schedule(
        wait=options.profile_freq - options.profiler_warmup - options.profiler_active,
        warmup=options.profiler_warmup,
        active=options.profiler_active,
        repeat=options.profiler_repeat or 0,
        skip_first=options.profiler_skip_first or 0,
        **({"skip_first_wait": options.profiler_skip_first_wait} if options.profiler_skip_first_wait else {}),
    )
    return lambda step: chosen(step - 1)


def _from_step(schedule: Callable[[int], Any], first: int) -> Callable[[int], Any]:
    """The same schedule for a profiler that asks for step 0 as it is made, and from then on for steps of the run."""
    return lambda step: schedule(max(step, first))
