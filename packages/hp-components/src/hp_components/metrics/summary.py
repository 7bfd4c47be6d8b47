"""What a run looks back on: one short table at its end.

In: the records of the whole run, also those of its earlier parts. Out: rows (what, value) for the console.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from hp_components.metrics.text_curve import sparkline
from hp_components.metrics.units import duration, share

__all__ = ["summary_rows"]

CURVE_WIDTH = 24


def summary_rows(
    records: Iterable[Mapping[str, Any]], total_steps: int, *, host_gib: float, curve: bool = True
) -> list[tuple[str, str]]:
    """The rows of the table; none without a record.

    Args:
        records: lines of `metrics.jsonl`, events among them.
        total_steps: the run's last step.
        host_gib: the process's peak resident memory, told where the device has no memory of its own.
        curve: whether the console can show block characters.
    """
    lines = list(records)
    steps = [line for line in lines if "event" not in line]
    if not steps:
        return []
    last = steps[-1]
    losses = [step["loss"] for step in steps]
    rows = [
        ("steps", f"{last['step']:,} of {total_steps:,}"),
        ("loss", f"{_loss(losses[0])} to {_loss(losses[-1])}"),
    ]
    if curve and len(losses) > 2:
        rows.append(("", sparkline(losses, CURVE_WIDTH)))
    rows += [
        ("time", duration(last["time"])),
        ("tokens", f"{last['tokens']:,}" + (f", {last['tokens'] / last['time']:,.0f} tok/s" if last["time"] else "")),
        ("data wait", share(_mean(steps, "data_wait"))),
        ("mfu", share(_mean(steps, "mfu"))),
        ("memory", _memory(steps, host_gib)),
    ]
    if bad := [line for line in lines if line.get("event") == "non_finite"]:
        rows.append(("not finite", f"{len(bad):,} steps, the first is {bad[0]['step']:,}"))
    return rows


def _loss(value: float | None) -> str:
    return "nan" if value is None else f"{value:.4f}"


def _mean(steps: list[Mapping[str, Any]], key: str) -> float | None:
    """The mean over time of a rate: each record weighs as much as the seconds that it covers."""
    total = weight = before = 0.0
    for step in steps:
        seconds, before = step["time"] - before, step["time"]
        if step[key] is not None:
            total += step[key] * seconds
            weight += seconds
    return total / weight if weight > 0 and math.isfinite(total) else None


def _memory(steps: list[Mapping[str, Any]], host_gib: float) -> str:
    peaks = [step["memory_gib"] for step in steps if step["memory_gib"] is not None]
    return f"{max(peaks):.2f} GiB at most" if peaks else f"n/a (the process: {host_gib:.2f} GiB)"
