"""The shared training step with what the older trainer adds: hooks inside a step, and its other way to average.

In and out: as `TrainingStep`; with `rank_average` every micro-batch of every rank weighs the same, however many tokens
it has, unless it has none.
Shape suffixes: D data-parallel ranks, M micro-batches of one of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from hp_trainer.training_step import Batch, Fetched, StepResult, TrainingStep

__all__ = ["LegacyStep", "LocalLoss"]


@dataclass(slots=True)
class LocalLoss:
    """The loss of this rank's own tokens in the step at hand, for `report_global_loss: false`; 0 if it has none."""

    total: torch.Tensor | float = 0.0
    divisors: list[torch.Tensor] = field(default_factory=list)
    """Of the loss sums of the micro-batches that are still to come, where each has its own."""

    scales: list[torch.Tensor] = field(default_factory=list)
    """From a micro-batch's share in the loss of all ranks to that in this one."""

    def take(self) -> float:
        """Of the step that is done; a new one begins."""
        loss, self.total = float(self.total), 0.0
        return loss


@dataclass(frozen=True, slots=True)
class LegacyStep(TrainingStep):
    """`after_substep` is called behind each backward pass, `before_update` when all gradients are there, before they
    are clipped."""

    rank_average: bool
    local_loss: LocalLoss
    after_substep: Callable[[], None]
    before_update: Callable[[], None]

    def run(self, fetched: Fetched, valid_tokens: int) -> StepResult:
        own = self.local_loss
        seen_M = torch.stack([self.loss_fn.count_tokens(batch["labels"]) for batch in fetched.micro_batches])
        own.total = 0.0
        if self.rank_average:
            # As whole rows, which the ranks of a context-parallel group hold stretches of.
            tokens_DM = self._tokens_of_all(seen_M)
            tokens_M = tokens_DM[self.environment.dp_rank]
            # An epoch's last batches may have ranks that get nothing but padding: there is no mean to take part with.
            counted = (tokens_DM > 0).sum().clamp(min=1)
            own.divisors = list(tokens_M.clamp(min=1) * counted)
            own.scales = list(tokens_M / seen_M.clamp(min=1) * (counted / (seen_M > 0).sum().clamp(min=1)))
        else:
            own.scales = [valid_tokens / seen_M.sum().clamp(min=1)] * len(seen_M)
        return TrainingStep.run(self, fetched, valid_tokens)

    def backward(self, batch: Batch, divisor: torch.Tensor) -> torch.Tensor:
        own = self.local_loss
        share = TrainingStep.backward(self, batch, own.divisors.pop(0) if self.rank_average else divisor)
        # Kept as a tensor: a number would make the host wait for the device.
        own.total = own.total + share * own.scales.pop(0)
        self.after_substep()
        return share

    def clip(self) -> torch.Tensor | None:
        self.before_update()
        return TrainingStep.clip(self)

    def _tokens_of_all(self, seen_M: torch.Tensor) -> torch.Tensor:
        """The valid tokens of every micro-batch of every data-parallel rank: one sum, also over those that share rows.

        Args:
            seen_M: of this rank.
        """
        tokens_DM = seen_M.new_zeros(self.environment.dp_degree, len(seen_M))
        tokens_DM[self.environment.dp_rank] = seen_M
        return self.environment.sum_over_data(tokens_DM)
