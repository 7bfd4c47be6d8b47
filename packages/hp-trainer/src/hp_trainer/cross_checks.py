"""What parts of a trainer's config cannot do together, found before anything starts.

In: a `HyperTrainer.Config`. Out: one `Fault` per combination, with the paths of all the fields that take part.
"""

from __future__ import annotations

import inspect
import math
from typing import TYPE_CHECKING

from hp_protocols.errors import Fault

if TYPE_CHECKING:
    from torch import nn

    from hp_components import BaseDataLoader
    from hp_trainer.hyper_trainer import HyperTrainer

__all__ = ["cross_faults", "document_mask_faults", "machine_faults"]


def cross_faults(config: HyperTrainer.Config) -> list[Fault]:
    """Every combination of sections that cannot be trained."""
    return [*_in_backward_faults(config), *_graph_faults(config)]


def machine_faults(config: HyperTrainer.Config) -> list[Fault]:
    """What this machine lacks for this run: extras that are not installed, an accelerator.

    Kept apart from the faults of the values, with which the config of a run could not be read on another machine.
    """
    return [*config.metrics.machine_faults("metrics"), *config.profiler.machine_faults("profiler")]


def document_mask_faults(dataloader: BaseDataLoader, model: nn.Module) -> list[Fault]:
    """Boundaries of documents need a model that takes them."""
    taken = inspect.signature(type(model).forward).parameters
    open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values())
    if not dataloader.document_mask or open_ended or {"position_ids", "cu_seqlens"} <= set(taken):
        return []
    problem = f"is on, but {type(model).__name__} does not take document boundaries (cu_seqlens)"
    return [Fault("dataloader.document_mask", problem, hint="--dataloader.document_mask=false")]


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
    if config.compile.mode != "graph" or not config.optimizer.in_backward:
        return []
    problem = "Graph Mode updates parameters after backward"
    return [Fault("optimizer.in_backward, compile.mode", problem, hint="drop in_backward")]
