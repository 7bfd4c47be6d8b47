"""What parts of a trainer's config cannot do together, found before anything starts.

In: a `HyperTrainer.Config`. Out: one `Fault` per combination, with the paths of all the fields that take part.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from hp_protocols.errors import Fault

if TYPE_CHECKING:
    from hp_trainer.hyper_trainer import HyperTrainer

__all__ = ["cross_faults"]


def cross_faults(config: HyperTrainer.Config) -> list[Fault]:
    """Every combination of sections that cannot be trained."""
    return [*_in_backward_faults(config), *_graph_faults(config)]


def _in_backward_faults(config: HyperTrainer.Config) -> list[Fault]:
    """A step inside backward sees one gradient at a time."""
    if not config.optimizer.in_backward or math.isinf(config.training.max_norm):
        return []
    return [
        Fault(
            "optimizer.in_backward, training.max_norm",
            f"gradients are used up within backward, before they could be clipped to a norm of "
            f"{config.training.max_norm:g}",
            hint="--training.max_norm inf, or drop in_backward",
        )
    ]


def _graph_faults(config: HyperTrainer.Config) -> list[Fault]:
    """Graph Mode captures a step of which it knows where backward ends and the update begins."""
    if config.compile.mode != "graph":
        return []
    faults = []
    if config.optimizer.in_backward:
        problem = "Graph Mode updates parameters after backward"
        faults.append(Fault("optimizer.in_backward, compile.mode", problem, hint="drop in_backward"))
    if hasattr(config.loss, "num_chunks"):
        problem = "Graph Mode does not capture a loss that is computed in chunks"
        faults.append(Fault("loss, compile.mode", problem, hint="use CrossEntropyLoss"))
    return faults
