"""GradientHealthCallback and MoEMonitorCallback: what is looked at between backward and update.

In: gradients; token counts of experts. Out: the names of parameters whose gradient is not finite; balanced experts.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

from hp_protocols.distributed import canonical_named_parameters
from hp_trainer._legacy.callbacks.base import Callback

if TYPE_CHECKING:
    from hp_trainer._legacy.llm_trainer import LLMTrainer

__all__ = ["GradientHealthCallback", "MoEMonitorCallback"]

logger = logging.getLogger(__name__)

SHOWN = 8


class GradientHealthCallback(Callback):
    """`debug.check_nan_inf`: which gradients are not finite. The step itself leaves its update out then."""

    def __init__(self) -> None:
        self.bad: list[str] = []

    def on_pre_optimizer_step(self, trainer: LLMTrainer) -> None:
        own = [name for name, parameter in canonical_named_parameters(trainer.model) if not _is_finite(parameter.grad)]
        everyone = trainer.environment.platform.all_gather_object(own)
        self.bad = sorted({name for names in everyone for name in names})
        if self.bad:
            ranks = [rank for rank, names in enumerate(everyone) if names]
            more = f" and {len(self.bad) - SHOWN} more" if len(self.bad) > SHOWN else ""
            where = f" (seen by rank {', '.join(map(str, ranks))})" if len(everyone) > 1 else ""
            logger.error(
                "step %d: gradients that are not finite: %s%s%s",
                trainer.state.step + 1, ", ".join(self.bad[:SHOWN]), more, where,
            )  # fmt: skip


def _is_finite(grad: torch.Tensor | None) -> bool:
    if grad is None:
        return True
    local = grad.to_local() if isinstance(grad, DTensor) else grad
    return bool(local.isfinite().all())


class MoEMonitorCallback(Callback):
    """`moe_monitor`: reports how unequal the experts' loads are, and evens them out by the router's bias.

    It looks at modules with a buffer `tokens_per_expert` (counted up in forward); where there is an `expert_bias` too,
    experts with less than the mean get `lr` more, those with more get `lr` less (arXiv 2408.15664).

    Args:
        lr: of the bias; 0 only reports.
        num_recomputations: how often forward runs per micro-batch, since recomputation counts again.
    """

    def __init__(self, lr: float, num_recomputations: int = 1) -> None:
        self.lr, self.num_recomputations = lr, num_recomputations
        self.load: dict[str, float] = {}

    @torch.no_grad()
    def on_pre_optimizer_step(self, trainer: LLMTrainer) -> None:
        for name, module in _routers(trainer.model):
            tokens = module.get_buffer("tokens_per_expert")
            counts = trainer.environment.sum_over_data(tokens.double() / self.num_recomputations)
            mean = counts.mean()
            self.load[name] = float(counts.max() / mean.clamp(min=1e-9))
            bias = getattr(module, "expert_bias", None)
            if isinstance(bias, torch.Tensor):
                bias.add_(self.lr * torch.sign(mean - counts).to(bias.dtype))
            tokens.zero_()

    def on_log(self, trainer: LLMTrainer, logs: dict[str, float]) -> None:
        for name, load in self.load.items():
            logger.info("step %d: %s: the busiest expert has %.2f times the mean", trainer.state.step, name, load)


def _routers(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    for name, module in model.named_modules():
        if "tokens_per_expert" in dict(module.named_buffers(recurse=False)):
            yield name, module
