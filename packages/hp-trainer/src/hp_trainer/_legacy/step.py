"""The shared training step with what the older trainer adds: hooks inside a step, and its other way to average.

In and out: as `TrainingStep`; with `rank_average` every micro-batch of every rank weighs the same, however many tokens
it has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from hp_trainer.training_step import Batch, Fetched, StepResult, TrainingStep

__all__ = ["LegacyStep", "LocalLoss"]


@dataclass(slots=True)
class LocalLoss:
    """The loss of this rank's own tokens in the step at hand, for `report_global_loss: false`; and how many
    micro-batches the step has, which at the end of the data may be fewer than in others."""

    total: torch.Tensor | float = 0.0
    parts: int = 0
    expected: int = 1

    def take(self) -> float:
        """The mean over the micro-batches of the step; a new step begins."""
        mean = float(self.total) / max(self.parts, 1)
        self.total, self.parts = 0.0, 0
        return mean


@dataclass(frozen=True, slots=True)
class LegacyStep(TrainingStep):
    """`after_substep` is called behind each backward pass, `before_update` when all gradients are there, before they
    are clipped."""

    rank_average: bool
    local_loss: LocalLoss
    after_substep: Callable[[], None]
    before_update: Callable[[], None]

    def run(self, fetched: Fetched, valid_tokens: int) -> StepResult:
        self.local_loss.expected = len(fetched.micro_batches)
        return TrainingStep.run(self, fetched, valid_tokens)

    def backward(self, batch: Batch, divisor: torch.Tensor) -> torch.Tensor:
        seen = self.loss_fn.count_tokens(batch["labels"])
        if self.rank_average:
            divisor = self._of_whole_rows(seen).clamp(min=1) * (self.local_loss.expected * self.environment.dp_degree)
        share = TrainingStep.backward(self, batch, divisor)
        # Kept as a tensor: a number would make the host wait for the device.
        self.local_loss.total = self.local_loss.total + share * (divisor / seen.clamp(min=1))
        self.local_loss.parts += 1
        self.after_substep()
        return share

    def clip(self) -> torch.Tensor | None:
        self.before_update()
        return TrainingStep.clip(self)

    def _of_whole_rows(self, tokens: torch.Tensor) -> torch.Tensor:
        """Ranks of one context-parallel group hold stretches of the same rows."""
        mesh = self.environment.parallel_dims.get_optional_mesh("cp")
        if mesh is not None:
            tokens = tokens.clone()
            self.environment.platform.all_reduce(tokens, group=mesh.get_group())
        return tokens
