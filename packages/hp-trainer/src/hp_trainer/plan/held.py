"""Bytes on a device, by what they are for.

In: nothing. Out: `Held`, which adds and subtracts, `Use`, its parts, and `Interval`, a stretch of a step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["STATES", "Held", "Interval", "Use"]


class Use(StrEnum):
    """What memory is for. Values are the fields of `Held`."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    GATHERED = "gathered"
    REDUCED = "reduced"
    ACTIVATIONS = "activations"


STATES = (Use.PARAMETERS, Use.GRADIENTS, Use.OPTIMIZER)
"""What stays from step to step (gradients: from backward to the update)."""


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes of one rank, by `Use`.

    Attributes:
        parameters, gradients, optimizer: the rank's own shards.
        gathered: whole weights of the units at work, and the buffers of their all-gather.
        reduced: whole gradients of the units at work, and the buffers of their reduce-scatter.
        activations: everything else: what backward needs, logits, temporary results, batch, buffers of the model.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    gathered: int = 0
    reduced: int = 0
    activations: int = 0

    def __add__(self, other: Held) -> Held:
        return Held(*(a + b for a, b in zip(self.parts(), other.parts(), strict=True)))

    def __sub__(self, other: Held) -> Held:
        return Held(*(a - b for a, b in zip(self.parts(), other.parts(), strict=True)))

    def scaled(self, factor: float) -> Held:
        """Each part times a factor, in whole bytes."""
        return Held(*(round(part * factor) for part in self.parts()))

    def parts(self) -> tuple[int, ...]:
        """The bytes in the order of `Use`."""
        return dataclasses.astuple(self)

    def of(self, uses: Collection[Use]) -> int:
        """The bytes for some uses."""
        return sum(value for use, value in zip(Use, self.parts(), strict=True) if use in uses)

    @property
    def total(self) -> int:
        return sum(self.parts())


@dataclass(frozen=True, slots=True)
class Interval:
    """A stretch of a step: what was held when it began, at its highest point, and when it ended.

    Attributes:
        phase: forward, backward, loss …
        layer: the number of the layer at work, if one is.
    """

    phase: str
    layer: int | None
    start: Held
    peak: Held
    end: Held
