"""Turns the numbers of each step into records, a console line, a bar and a picture.

In: `begin(step)`, then `record(...)` once per step with numbers already reduced over ranks, `event(...)`, and
`close()`. Out: `metrics.jsonl`, `loss.png` and the console, all from rank 0 only (M36).
"""

from __future__ import annotations

import logging
import math
import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from hp_components.metrics.console import Console, NoConsole, make_console, record_fields
from hp_components.metrics.jsonl import JsonlWriter
from hp_components.metrics.peak import peak_tflops
from hp_components.metrics.plot import plot_loss
from hp_components.metrics.window import Window
from hp_protocols.configurable import Configurable
from hp_protocols.errors import ConfigError, Fault
from hp_protocols.platform import get_platform

__all__ = ["MetricsProcessor"]

logger = logging.getLogger(__name__)

RECORD_FILE = "metrics.jsonl"
PICTURE_FILE = "loss.png"
_GIB = 2**30


class MetricsProcessor(Configurable):
    """Collects one number per step, and reports at step 1, at every multiple of `log_freq` and at the last step.

    Its state (sums since the last record, totals) belongs in the checkpoint: then a resumed run writes the records
    that an uninterrupted one would have written.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        log_freq: int = 10
        """Steps between records."""

        peak_tflops: float | None = None
        """Peak TFLOP/s of one device in the type it computes in, for MFU. None: known devices by name, else n/a."""

        def faults(self, path: str) -> list[Fault]:
            """Values that no run could have."""
            faults = []
            if self.log_freq < 1:
                faults.append(Fault(f"{path}.log_freq", f"{self.log_freq} is too small", allowed="1 or more"))
            if self.peak_tflops is not None and not 0.0 < self.peak_tflops < math.inf:
                faults.append(Fault(f"{path}.peak_tflops", f"{self.peak_tflops} is no speed", allowed="above 0"))
            return faults

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
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """
        Args:
            config: see `Config`.
            run_folder: where the files go.
            total_steps: the run's last step.
            rank: only rank 0 writes.
            world_size: the number of devices, for MFU.
            flops_per_token: forward and backward, for MFU; None makes it n/a.
            compute_dtype: what the model computes in; the table of devices knows bfloat16 and float16.
            title: of the picture, such as the recipe's name.
            stream: for the console; default standard output.
            clock: seconds, rising.
        """
        if faults := config.faults("metrics"):
            raise ConfigError(faults)
        self.config = config
        self.total_steps = total_steps
        self.window = Window()
        self._folder = Path(run_folder)
        self._title = title
        self._clock = clock
        self._writer = JsonlWriter(self._folder / RECORD_FILE) if rank == 0 else None
        self._console: Console = make_console(stream) if rank == 0 else NoConsole()
        self._peak_flops = _peak_flops(config, compute_dtype, world_size)
        self._flops_per_token = flops_per_token
        self._last: tuple[int, float | None, float | None] = (0, None, None)
        self._tick: float | None = None
        self._closed = False

    def is_log_step(self, step: int) -> bool:
        """Whether a record is written after `step`."""
        return step == 1 or step % self.config.log_freq == 0 or step == self.total_steps

    def begin(self, step: int = 0) -> None:
        """Start the clock, going on after `step`; records of later steps, from a run that was cut off, are dropped."""
        if self._tick is not None:
            raise RuntimeError("metrics have begun already")
        if self._writer is not None and (dropped := self._writer.open(step)):
            logger.info(
                "%s: %d records after step %d dropped; the run goes on from there", self._writer.path, dropped, step
            )
        self._last = (step, None, None)
        self._console.begin(step, self.total_steps)
        self._tick = self._clock()

    def record(
        self, step: int, *, loss: float, grad_norm: float | None, lr: float, tokens: int, data_wait_s: float = 0.0
    ) -> dict[str, Any] | None:
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

    def note(self, text: str) -> None:
        """Show a line, above the bar if there is one."""
        self._console.note(text)

    def close(self, *, finished: bool = False) -> None:
        """End reporting and draw the picture. May be called twice.

        Args:
            finished: the run ended by itself before `total_steps` (the data was exhausted): its last steps become a
                record. An interrupted run leaves them to the run that resumes it.
        """
        if self._closed:
            return
        self._closed = True
        if finished and self.window.steps:
            self._write_record()
        self._console.close()
        if self._writer is None:
            return
        self._writer.close()
        self._draw()

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to go on with the same records."""
        return self.window.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a saved state."""
        self.window.load_state_dict(state_dict)

    def _write_record(self) -> dict[str, Any]:
        step, grad_norm, lr = self._last
        window = self.window
        speed = window.tokens / window.seconds if window.seconds > 0 else None
        memory, label = _peak_memory()
        record = {
            "step": step,
            "time": self._time(),
            "loss": _finite(window.loss_sum / window.steps),
            "grad_norm": _finite(grad_norm),
            "lr": _finite(lr),
            "tokens": window.total_tokens,
            "tokens_per_second": _rounded(speed, 3),
            "memory_gib": _rounded(memory, 3),
            "mfu": _rounded(self._mfu(speed), 5),
            "data_wait": _rounded(min(window.wait_seconds / window.seconds, 1.0), 4) if window.seconds > 0 else None,
        }
        eta = (self.total_steps - step) * window.seconds / window.steps
        self.window.restart()
        if self._writer is not None:
            self._writer.write(record)
        self._console.record(record_fields(record, self.total_steps, eta, label))
        return record

    def _report_non_finite(self, step: int, **values: float | None) -> None:
        bad = [f"{name}={value}" for name, value in values.items() if value is not None and not math.isfinite(value)]
        if bad:
            self.event("non_finite", values=bad)

    def _mfu(self, tokens_per_second: float | None) -> float | None:
        if self._flops_per_token is None or self._peak_flops is None or tokens_per_second is None:
            return None
        return self._flops_per_token * tokens_per_second / self._peak_flops

    def _time(self) -> float:
        return round(self.window.total_seconds, 3)

    def _draw(self) -> None:
        try:
            plot_loss({self._title: self._folder / RECORD_FILE}, self._folder / PICTURE_FILE, self._title)
        except OSError as error:
            logger.error("%s could not be drawn: %s", self._folder / PICTURE_FILE, error)


def _rounded(value: float | None, digits: int) -> float | None:
    """What is measured, not computed, is not worth more digits to a reader."""
    return None if value is None else round(value, digits)


def _finite(value: float | None) -> float | None:
    """JSON has no nan: such a value is null in the record, and an event says what it was."""
    return value if value is not None and math.isfinite(value) else None


def _peak_memory() -> tuple[float, str]:
    """(GiB, label): the device's peak where there is one, else this process's peak resident set."""
    device_bytes = get_platform().max_memory()
    if device_bytes is not None:
        return device_bytes / _GIB, "mem"
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024) / _GIB, "rss"


def _peak_flops(config: MetricsProcessor.Config, compute_dtype: str | None, world_size: int) -> float | None:
    """FLOP/s of all devices together, or None."""
    peak = config.peak_tflops
    if peak is None and compute_dtype in ("bfloat16", "float16"):
        peak = peak_tflops(get_platform().device_name())
    return None if peak is None else peak * 1e12 * world_size
