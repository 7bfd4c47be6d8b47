"""A curve in one line of text.

In: numbers. Out: `sparkline`, block characters from the lowest to the highest value. Needs nothing but Python.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

__all__ = ["sparkline"]

_BLOCKS = "▁▂▃▄▅▆▇█"
_NOT_FINITE = "×"


def sparkline(values: Sequence[float | None], width: int) -> str:
    """The curve in at most `width` characters: each the mean of its stretch of values.

    A stretch that holds a value that is not finite (or None, which is how a record says so) shows as ×.
    """
    if width < 1:
        raise ValueError(f"a width of {width} leaves no room for a curve")
    means = [_mean(stretch) for stretch in _stretches(values, min(width, len(values)))]
    finite = [mean for mean in means if mean is not None]
    if not finite:
        return _NOT_FINITE * len(means)
    low, high = min(finite), max(finite)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_NOT_FINITE if mean is None else _BLOCKS[round((mean - low) * scale)] for mean in means)


def _stretches(values: Sequence[float | None], count: int) -> list[Sequence[float | None]]:
    edges = [len(values) * index // count for index in range(count + 1)] if count else []
    return [values[start:end] for start, end in pairwise(edges)]


def _mean(values: Sequence[float | None]) -> float | None:
    finite = [value for value in values if value is not None and math.isfinite(value)]
    return sum(finite) / len(finite) if len(finite) == len(values) else None
