"""What has been measured since the last record: the part of the metrics that a checkpoint must carry.

In: one step at a time. Out: means and rates over the steps since the last record. Sums are kept in the order of
the steps, so that a resumed run's means have the same bits.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Window"]


@dataclass(slots=True)
class Window:
    """Sums since the last record, and totals of the run."""

    steps: int = 0
    loss_sum: float = 0.0
    tokens: int = 0
    seconds: float = 0.0
    wait_seconds: float = 0.0
    total_tokens: int = 0
    total_seconds: float = 0.0

    def add(self, loss: float, tokens: int, seconds: float, wait_seconds: float) -> None:
        """Take in one step."""
        self.steps += 1
        self.loss_sum += loss
        self.tokens += tokens
        self.seconds += seconds
        self.wait_seconds += wait_seconds
        self.total_tokens += tokens
        self.total_seconds += seconds

    def restart(self) -> None:
        """Begin a new window; totals go on."""
        self.steps, self.tokens = 0, 0
        self.loss_sum = self.seconds = self.wait_seconds = 0.0

    def state_dict(self) -> dict[str, Any]:
        """Everything, as plain numbers."""
        return asdict(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a saved window."""
        for name, value in state_dict.items():
            setattr(self, name, value)
