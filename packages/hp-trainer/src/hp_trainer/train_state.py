"""How far a run has come: saved with every checkpoint, so that a resumed run goes on from there.

In and out: `state_dict()` / `load_state_dict()` as torch's distributed checkpoint calls them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class TrainState:
    """Optimizer steps done, tokens seen over all ranks, and the seed that everything was drawn from."""

    step: int = 0
    tokens_seen: int = 0
    seed: int = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "tokens_seen": self.tokens_seen, "seed": self.seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.tokens_seen, self.seed = state["step"], state["tokens_seen"], state["seed"]
