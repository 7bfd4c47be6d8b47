"""How a run looks while it trains: a bar and lines on a terminal, plain lines everywhere else.

In: what a record says. Out: text. Off a terminal there is no control character, on a narrow one the less
important fields give way.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TextIO

__all__ = ["Console", "make_console", "record_fields"]

_REFRESH_SECONDS = 0.25
# Fields in the order in which they give way on a narrow terminal.
_GIVE_WAY = ("mfu", "wait", "mem", "grad", "lr", "speed", "eta")


class Console(Protocol):
    """Where lines go."""

    def begin(self, step: int, total_steps: int) -> None: ...
    def progress(self, step: int) -> None: ...
    def record(self, fields: Mapping[str, str]) -> None: ...
    def note(self, text: str) -> None: ...
    def close(self) -> None: ...


def record_fields(
    record: Mapping[str, Any], total_steps: int, eta_seconds: float | None, memory_label: str
) -> dict[str, str]:
    """A record as short texts by field, in the order in which they are shown."""
    loss, grad, mfu = record["loss"], record["grad_norm"], record["mfu"]
    memory, wait = record["memory_gib"], record["data_wait"]
    fields = {
        "step": f"step {record['step']}/{total_steps}",
        "loss": "loss " + (f"{loss:.4f}" if loss is not None else "nan"),
        "lr": "lr " + (f"{record['lr']:.1e}" if record["lr"] is not None else "nan"),
        "grad": "grad " + (f"{grad:.2f}" if grad is not None else "nan"),
        "mem": f"{memory_label} {memory:.1f} GiB" if memory is not None else f"{memory_label} n/a",
        "speed": f"{record['tokens_per_second']:,.0f} tok/s" if record["tokens_per_second"] is not None else "",
        "mfu": f"mfu {mfu:.1%}" if mfu is not None else "",
        "wait": f"data wait {wait:.0%}" if wait is not None and wait >= 0.01 else "",
        "eta": f"eta {duration(eta_seconds)}" if eta_seconds is not None else "",
    }
    return {name: text for name, text in fields.items() if text}


def duration(seconds: float) -> str:
    """`9s`, `1m32s`, `2h05m`, `3d04h`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


class PlainConsole:
    """Lines for files and pipes."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def begin(self, step: int, total_steps: int) -> None:
        pass

    def progress(self, step: int) -> None:
        pass

    def record(self, fields: Mapping[str, str]) -> None:
        self.note("  ".join(fields.values()))

    def note(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def close(self) -> None:
        pass


class TerminalConsole:
    """Lines above a progress bar, log lines among them.

    Refreshed by the training thread, a few times a second: no thread of its own.
    """

    def __init__(self, stream: TextIO, clock: Callable[[], float]) -> None:
        from rich.console import Console as RichConsole
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._rich = RichConsole(file=stream, highlight=False)
        self._bar = Progress(
            TextColumn("training"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeRemainingColumn(compact=True),
            console=self._rich,
            auto_refresh=False,
            transient=True,
            # What goes to a file goes on going there.
            redirect_stderr=sys.stderr.isatty(),
        )
        self._clock = clock
        self._refreshed = -_REFRESH_SECONDS
        self._task: Any = None
        self._rerouted: list[tuple[logging.StreamHandler[Any], Any]] = []

    def begin(self, step: int, total_steps: int) -> None:
        self._task = self._bar.add_task("training", total=total_steps, completed=step)
        streams = (sys.stdout, sys.stderr)
        self._bar.start()
        # rich puts streams of its own into sys, whose lines go above the bar. Log handlers hold the former ones.
        for handler in logging.getLogger().handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream in streams:
                ours = sys.stdout if handler.stream is streams[0] else sys.stderr
                self._rerouted.append((handler, handler.setStream(ours)))

    def progress(self, step: int) -> None:
        self._bar.update(self._task, completed=step)
        if (now := self._clock()) - self._refreshed >= _REFRESH_SECONDS:
            self._refreshed = now
            self._bar.refresh()

    def record(self, fields: Mapping[str, str]) -> None:
        self.note("  ".join(fitting(fields, self._rich.width).values()))

    def note(self, text: str) -> None:
        self._rich.print(text, markup=False, soft_wrap=True)

    def close(self) -> None:
        for handler, stream in self._rerouted:
            if stream is not None:
                handler.setStream(stream)
        self._rerouted.clear()
        self._bar.stop()


class NoConsole:
    """For ranks other than 0."""

    def begin(self, step: int, total_steps: int) -> None:
        pass

    def progress(self, step: int) -> None:
        pass

    def record(self, fields: Mapping[str, str]) -> None:
        pass

    def note(self, text: str) -> None:
        pass

    def close(self) -> None:
        pass


def fitting(fields: Mapping[str, str], width: int) -> dict[str, str]:
    """The fields that fit into one line; step and loss always stay."""
    kept = dict(fields)
    for name in _GIVE_WAY:
        if len("  ".join(kept.values())) <= width:
            break
        kept.pop(name, None)
    return kept


def make_console(stream: TextIO | None, clock: Callable[[], float] = time.monotonic) -> Console:
    """The console that suits the stream (default: standard output)."""
    stream = stream if stream is not None else sys.stdout
    dumb = os.environ.get("TERM", "").lower() in ("dumb", "unknown")
    return TerminalConsole(stream, clock) if stream.isatty() and not dumb else PlainConsole(stream)
