"""Turns the numbers of each step into records, a console line, a bar, curves and a picture.

In: `begin(step)`, then `record(...)` once per step with numbers already reduced over ranks, `event(...)`, and
`close()`. Out: `metrics.jsonl`, `loss.png`, the console, TensorBoard and W&B where asked for, all from rank 0 (M36).
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from hp_components._extras import missing_extra_fault
from hp_components._folders import outside_fault
from hp_components.metrics.console import Console, NoConsole, make_console, record_fields
from hp_components.metrics.curves import CurveWriter, make_curve_writers
from hp_components.metrics.jsonl import JsonlWriter, read_records
from hp_components.metrics.memory import host_memory_gib, take_device_memory_gib
from hp_components.metrics.peak import peak_tflops
from hp_components.metrics.plot import plot_loss
from hp_components.metrics.record import Record
from hp_components.metrics.summary import summary_rows
from hp_components.metrics.units import duration
from hp_components.metrics.window import Window
from hp_protocols.configurable import Configurable
from hp_protocols.errors import ConfigError, Fault
from hp_protocols.platform import get_platform

__all__ = ["MetricsProcessor"]

logger = logging.getLogger(__name__)

RECORD_FILE = "metrics.jsonl"
PICTURE_FILE = "loss.png"


class MetricsProcessor(Configurable):
    """Collects one number per step, and reports at step 1, at every multiple of `log_freq` and at the last step.

    Its state (sums since the last record, totals) belongs in the checkpoint: then a resumed run writes the records
    that an uninterrupted one would have written.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        log_freq: int = 10
        """Steps between records."""

        enable_tensorboard: bool = False
        """Write the curves for TensorBoard too. Needs the extra `tensorboard`."""

        save_tb_folder: str = "tb"
        """Folder of TensorBoard's files, inside the run folder."""

        enable_wandb: bool = False
        """Send the curves to Weights & Biases too; WANDB_MODE=offline keeps them here. Needs the extra `wandb`."""

        save_for_all_ranks: bool = False
        """Every rank writes its own metrics.rank-N.jsonl, TensorBoard and W&B curves; otherwise rank 0 alone does."""

        disable_color_printing: bool = False
        """No colors on the terminal; NO_COLOR does the same."""

        peak_tflops: float | None = None
        """Peak TFLOP/s of one device in the type it computes in, for MFU. None: known devices by name, else n/a."""

        def faults(self, path: str) -> list[Fault]:
            """Values that no run could have."""
            faults = []
            if self.log_freq < 1:
                faults.append(Fault(f"{path}.log_freq", f"{self.log_freq} is too small", allowed="1 or more"))
            if self.peak_tflops is not None and not 0.0 < self.peak_tflops < math.inf:
                faults.append(Fault(f"{path}.peak_tflops", f"{self.peak_tflops} is no speed", allowed="above 0"))
            if fault := outside_fault(f"{path}.save_tb_folder", self.save_tb_folder):
                faults.append(fault)
            return faults

        def machine_faults(self, path: str) -> list[Fault]:
            """What this machine lacks for a run with these values; another one may have it."""
            asked = (
                (self.enable_tensorboard, "enable_tensorboard", "tensorboard"),
                (self.enable_wandb, "enable_wandb", "wandb"),
            )
            found = [missing_extra_fault(f"{path}.{knob}", name, name) for enabled, knob, name in asked if enabled]
            return [fault for fault in found if fault is not None]

    def __init__(
        self,
        config: Config,
        *,
        run_folder: str | os.PathLike[str],
        total_steps: int,
        rank: int = 0,
        world_size: int = 1,
        flops_per_token: float | None = None,
        compute_dtype: str | None = None,
        title: str = "",
        config_dict: Mapping[str, Any] | None = None,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """
        Args:
            config: see `Config`.
            run_folder: where the files go.
            total_steps: the run's last step.
            rank: only rank 0 writes, unless `save_for_all_ranks`.
            world_size: the number of devices, for MFU.
            flops_per_token: forward and backward, for MFU; None makes it n/a.
            compute_dtype: what the model computes in; the table of devices knows bfloat16 and float16.
            title: of the picture, such as the recipe's name.
            config_dict: the resolved configuration of the run as plain data, shown by TensorBoard and W&B.
            stream: for the console; default standard output.
            clock: seconds, rising.

        Raises:
            ConfigError: values that no run could have, or an extra that is not installed.
        """
        if faults := config.faults("metrics") + config.machine_faults("metrics"):
            raise ConfigError(faults)
        self.config = config
        self.total_steps = total_steps
        self.window = Window()
        self._folder = Path(run_folder)
        self._title = title
        self._config_dict = config_dict
        self._clock = clock
        self._is_main = rank == 0
        writes = rank == 0 or config.save_for_all_ranks
        record_file = RECORD_FILE if rank == 0 else f"metrics.rank-{rank}.jsonl"
        self._writer = JsonlWriter(self._folder / record_file) if writes else None
        self._curves: list[CurveWriter] = make_curve_writers(config, self._folder, rank) if writes else []
        color = not config.disable_color_printing
        self._console: Console = make_console(stream, color=color) if rank == 0 else NoConsole()
        self._peak_flops = _peak_flops(config, compute_dtype, world_size)
        self._flops_per_token = flops_per_token
        self._last: tuple[int, float | None, float] = (0, None, math.nan)
        self._tick: float | None = None
        self._told_non_finite = False
        self._closed = False

    def is_log_step(self, step: int) -> bool:
        """Whether a record is written after `step`."""
        return step == 1 or step % self.config.log_freq == 0 or step == self.total_steps

    def begin(self, step: int = 0) -> None:
        """Start the clock, going on after `step`; records of later steps, from a run that was cut off, are dropped.

        Raises:
            ConfigError: W&B does not start.
        """
        if self._tick is not None:
            raise RuntimeError("metrics have begun already")
        if self._writer is not None and (dropped := self._writer.open(step)):
            logger.info(
                "%s: %d records after step %d dropped; the run goes on from there", self._writer.path, dropped, step
            )
        for curves in self._curves:
            curves.open(step, self._config_dict)
        self._last = (step, None, math.nan)
        self._console.begin(step, self.total_steps)
        if step:
            spent = f"{self.window.total_tokens:,} tokens in {duration(self.window.total_seconds)} so far"
            self._console.note(f"resumed after step {step}/{self.total_steps}, {spent}")
        take_device_memory_gib()  # what was needed to build the model is no step's memory
        self._tick = self._clock()

    def record(
        self, step: int, *, loss: float, grad_norm: float | None, lr: float, tokens: int, data_wait_s: float = 0.0
    ) -> Record | None:
        """Take in one step.

        Args:
            step: optimizer steps done.
            loss: mean over the step's valid tokens on all ranks.
            grad_norm: the global norm before clipping; None if it was not measured.
            lr: the learning rate of this step.
            tokens: the step's tokens on all ranks.
            data_wait_s: seconds this step waited for data.

        Returns:
            The record, if this is a log step.
        """
        if self._tick is None:
            raise RuntimeError("call begin() before record()")
        now = self._clock()
        self.window.add(loss, tokens, now - self._tick, data_wait_s)
        self._tick = now
        self._last = (step, grad_norm, lr)
        self._report_non_finite(step, loss=loss, grad_norm=grad_norm, lr=lr)
        record = self._write_record() if self.is_log_step(step) else None
        self._console.progress(step)
        return record

    def event(self, name: str, **fields: Any) -> None:
        """Write an object with `event` and the current step: something that happened, not a measurement."""
        for key in fields:
            if "loss" in key or key in ("event", "step", "time"):
                raise ValueError(f"event {name!r}: the key {key!r} is reserved for records")
        if self._writer is not None:
            self._writer.write({"event": name, "step": self._last[0], "time": self._time(), **fields})

    def validation(self, **values: float) -> None:
        """What was measured on held-out text after the current step: an event, and a point of curves of their own.

        In the event nan and inf are texts, since JSON has no such numbers.
        """
        finite = {name: value if math.isfinite(value) else str(value) for name, value in values.items()}
        self.event("validation", **finite)
        for curves in self._curves:
            curves.write(self._last[0], {f"validation/{name}": value for name, value in values.items()})

    def note(self, text: str) -> None:
        """Show a line, above the bar if there is one."""
        self._console.note(text)

    def close(self, *, finished: bool = False, summary: bool = False) -> None:
        """End reporting and draw the picture. May be called twice.

        Args:
            finished: the run ended by itself before `total_steps` (the data was exhausted): its last steps become a
                record. An interrupted run leaves them to the run that resumes it.
            summary: show a table of the whole run.
        """
        if self._closed:
            return
        self._closed = True
        if finished and self.window.steps:
            self._write_record()
        self._console.close()
        for curves in self._curves:
            curves.close()
        if self._writer is None:
            return
        self._writer.close()
        if self._is_main:
            if summary:
                self._show_summary()
            self._draw()

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to go on with the same records. Puts what was reported so far on disk."""
        for curves in self._curves:
            curves.flush()
        return self.window.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a saved state."""
        self.window.load_state_dict(state_dict)

    def _write_record(self) -> Record:
        step, grad_norm, lr = self._last
        window = self.window
        speed = window.tokens / window.seconds if window.seconds > 0 else None
        record = Record(
            step=step,
            time=self._time(),
            loss=window.loss_sum / window.steps,
            grad_norm=grad_norm,
            lr=lr,
            tokens=window.total_tokens,
            tokens_per_second=_rounded(speed, 3),
            memory_gib=_rounded(take_device_memory_gib(), 3),
            mfu=_rounded(self._mfu(speed), 5),
            data_wait=_rounded(min(window.wait_seconds / window.seconds, 1.0), 4) if window.seconds > 0 else None,
        )
        eta = (self.total_steps - step) * window.seconds / window.steps
        self.window.restart()
        self._told_non_finite = False
        if self._writer is not None:
            self._writer.write(record.as_json())
        for curves in self._curves:
            curves.write(step, record.scalars())
        self._console.record(record_fields(record, self.total_steps, eta))
        return record

    def _report_non_finite(self, step: int, **values: float | None) -> None:
        bad = [f"{name}={value}" for name, value in values.items() if value is not None and not math.isfinite(value)]
        if not bad:
            return
        self.event("non_finite", values=bad)
        # A run that has gone astray would fill the screen.
        if not self._told_non_finite:
            self._told_non_finite = True
            self._console.note(f"step {step}: not finite: {', '.join(bad)}")

    def _mfu(self, tokens_per_second: float | None) -> float | None:
        if self._flops_per_token is None or self._peak_flops is None or tokens_per_second is None:
            return None
        return self._flops_per_token * tokens_per_second / self._peak_flops

    def _time(self) -> float:
        return round(self.window.total_seconds, 3)

    def _show_summary(self) -> None:
        records = read_records(self._folder / RECORD_FILE)
        blocks = self._console.draws_blocks()
        rows = summary_rows(records, self.total_steps, host_gib=host_memory_gib(), curve=blocks)
        if rows:
            self._console.table(self._title or "this run", rows)

    def _draw(self) -> None:
        try:
            plot_loss({self._title: self._folder / RECORD_FILE}, self._folder / PICTURE_FILE, self._title)
        except OSError as error:
            logger.error("%s could not be drawn: %s", self._folder / PICTURE_FILE, error)


def _rounded(value: float | None, digits: int) -> float | None:
    """What is measured, not computed, is not worth more digits to a reader."""
    return None if value is None else round(value, digits)


def _peak_flops(config: MetricsProcessor.Config, compute_dtype: str | None, world_size: int) -> float | None:
    """FLOP/s of all devices together, or None."""
    peak = config.peak_tflops
    if peak is None and compute_dtype is not None:
        peak = peak_tflops(get_platform().device_name(), compute_dtype)
    return None if peak is None else peak * 1e12 * world_size
