"""The picture of the loss: raw and smoothed over steps, for one run or several.

In: files `metrics.jsonl` by name. Out: one PNG. Drawn without a display and without matplotlib's global state.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from hp_components.metrics.jsonl import read_records

__all__ = ["plot_loss", "smoothed"]


def plot_loss(runs: Mapping[str, str | os.PathLike[str]], out: str | os.PathLike[str], title: str = "") -> bool:
    """Draw the loss of each run over its steps.

    Args:
        runs: `metrics.jsonl` by the name to show.
        out: the PNG to write, atomically.
        title: above the picture.

    Returns:
        Whether there was anything to draw; without a single loss nothing is written.
    """
    curves = {name: curve for name, path in runs.items() if (curve := _curve(path))[0]}
    if not curves:
        return False
    # A Figure of its own: pyplot would keep state and look for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 4.5), dpi=140, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for index, (name, (steps, losses)) in enumerate(curves.items()):
        color = f"C{index}"
        several = len(curves) > 1
        if len(steps) > 4:
            axes.plot(steps, losses, color=color, alpha=0.3, linewidth=1, label=None if several else "per log interval")
            axes.plot(steps, smoothed(losses), color=color, linewidth=2, label=name if several else "smoothed")
        else:
            axes.plot(steps, losses, color=color, marker="o", linewidth=2, label=name if several else "loss")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("step")
    axes.set_ylabel("training loss (nats per token)")
    axes.set_title(title)
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    out = Path(out)
    temporary = out.with_name(f".{out.name}.tmp")
    try:
        figure.savefig(temporary, format="png")
        temporary.replace(out)
    finally:
        temporary.unlink(missing_ok=True)
    return True


def smoothed(values: Sequence[float]) -> list[float]:
    """A Gaussian mean over about a twentieth of the curve to either side; centred, so that it does not lag behind."""
    count = len(values)
    sigma = max(1.0, count / 40)
    reach = min(math.ceil(3 * sigma), (count - 1) // 2)
    kernel = np.exp(-0.5 * (np.arange(-reach, reach + 1) / sigma) ** 2)
    # At the ends the mean is over what there is.
    weight = np.convolve(np.ones(count), kernel, mode="same")
    return (np.convolve(values, kernel, mode="same") / weight).tolist()


def _curve(path: str | os.PathLike[str]) -> tuple[list[int], list[float]]:
    points = [(r["step"], r["loss"]) for r in read_records(path) if r.get("loss") is not None and "event" not in r]
    return [step for step, _ in points], [loss for _, loss in points]
