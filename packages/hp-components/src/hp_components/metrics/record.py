"""What one log step says, with the values as they were measured.

In: numbers of the steps since the previous record. Out: a `Record`; as JSON for `metrics.jsonl` (which has no nan),
and as scalars for curves (which have).
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Record"]


@dataclass(frozen=True, slots=True)
class Record:
    """One record. None is what was not measured; a value that is not finite stays what it is.

    Attributes:
        step: optimizer steps done.
        time: seconds of training so far, over all resumed parts of the run.
        loss: mean since the previous record.
        grad_norm, lr: of this step.
        tokens: tokens so far, on all ranks.
        tokens_per_second: since the previous record, on all ranks.
        memory_gib: peak of this rank's device since the previous record; None on the cpu.
        mfu: share of the devices' peak arithmetic.
        data_wait: share of the time spent waiting for data, since the previous record.
    """

    step: int
    time: float
    loss: float
    grad_norm: float | None
    lr: float
    tokens: int
    tokens_per_second: float | None
    memory_gib: float | None
    mfu: float | None
    data_wait: float | None

    def as_json(self) -> dict[str, Any]:
        """All keys; values that are not finite are None, since JSON has no nan (an event names them)."""
        return {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in asdict(self).items()
        }

    def scalars(self) -> dict[str, float]:
        """What was measured, by name, nan and inf among it; without the step, which is the other axis."""
        values = asdict(self)
        del values["step"]
        return {name: float(value) for name, value in values.items() if value is not None}
