"""How a run looks while it trains: a bar and lines on a terminal, plain lines everywhere else.

In: what a record says. Out: text. Off a terminal there is no control character, on a narrow one the less
important fields give way.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TextIO

from hp_components.metrics.record import Record
from hp_components.metrics.units import duration, share

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
    def table(self, title: str, rows: Sequence[tuple[str, str]]) -> None: ...
    def draws_blocks(self) -> bool: ...
    def close(self) -> None: ...


def record_fields(record: Record, total_steps: int, eta_seconds: float | None) -> dict[str, str]:
    """A record as short texts by field, in the order in which they are shown. What is not known is n/a."""
    memory, wait, speed = record.memory_gib, record.data_wait, record.tokens_per_second
    fields = {
        # As wide in the first line as in the last, so that columns stand.
        "step": f"step {record.step:>{len(str(total_steps))}}/{total_steps}",
        "loss": f"loss {record.loss:.4f}",
        "lr": f"lr {record.lr:.1e}",
        "grad": f"grad {record.grad_norm:.2f}" if record.grad_norm is not None else "grad n/a",
        "mem": f"mem {memory:.1f} GiB" if memory is not None else "mem n/a",
        "speed": f"{speed:,.0f} tok/s" if speed is not None else "",
        "mfu": f"mfu {share(record.mfu)}",
        "wait": f"data wait {wait:.0%}" if wait is not None and wait >= 0.01 else "",
        "eta": f"eta {duration(eta_seconds)}" if eta_seconds is not None else "",
    }
    return {name: text for name, text in fields.items() if text}


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

    def table(self, title: str, rows: Sequence[tuple[str, str]]) -> None:
        width = max(len(name) for name, _ in rows)
        self.note("\n".join(["", title, *(f"  {name:{width}}  {value}" for name, value in rows)]))

    def draws_blocks(self) -> bool:
        return can_draw_blocks(self._stream)

    def close(self) -> None:
        pass


class TerminalConsole:
    """Lines above a progress bar, log lines among them.

    Refreshed by the training thread, a few times a second: no thread of its own.
    """

    def __init__(self, stream: TextIO, clock: Callable[[], float], color: bool) -> None:
        from rich.console import Console as RichConsole
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        # NO_COLOR is rich's own business.
        self._rich = RichConsole(file=stream, highlight=False, no_color=None if color else True)
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
        if (now := self._clock()) - self._refreshed >= _REFRESH_SECONDS:
            self._refreshed = now
            self._bar.update(self._task, completed=step, refresh=True)

    def record(self, fields: Mapping[str, str]) -> None:
        self.note("  ".join(fitting(fields, self._rich.width).values()))

    def note(self, text: str) -> None:
        self._rich.print(text, markup=False, soft_wrap=True)

    def table(self, title: str, rows: Sequence[tuple[str, str]]) -> None:
        from rich import box
        from rich.table import Table
        from rich.text import Text

        table = Table(title=title, title_justify="left", title_style="bold", box=box.ROUNDED, show_header=False)
        table.add_column(style="cyan", no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in rows:
            table.add_row(name, Text(value))
        self._rich.print(table)

    def draws_blocks(self) -> bool:
        return can_draw_blocks(self._rich.file)

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

    def table(self, title: str, rows: Sequence[tuple[str, str]]) -> None:
        pass

    def draws_blocks(self) -> bool:
        return False

    def close(self) -> None:
        pass


def can_draw_blocks(stream: Any) -> bool:
    """Whether the stream's encoding has block characters; printing them to another would be an error."""
    try:
        "█".encode(getattr(stream, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def fitting(fields: Mapping[str, str], width: int) -> dict[str, str]:
    """The fields that fit into one line; step and loss always stay."""
    kept = dict(fields)
    for name in _GIVE_WAY:
        if len("  ".join(kept.values())) <= width:
            break
        kept.pop(name, None)
    return kept


def make_console(stream: TextIO | None, clock: Callable[[], float] = time.monotonic, *, color: bool = True) -> Console:
    """The console that suits the stream (default: standard output)."""
    stream = stream if stream is not None else sys.stdout
    dumb = os.environ.get("TERM", "").lower() in ("dumb", "unknown")
    return TerminalConsole(stream, clock, color) if stream.isatty() and not dumb else PlainConsole(stream)
