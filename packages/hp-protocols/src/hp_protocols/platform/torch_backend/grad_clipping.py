"""Clipping by the global gradient norm, for plain and distributed gradients on any mixture of meshes.

In: parameters with gradients. Out: their global 2-norm as a plain 0-d tensor, the same on every rank; gradients are
scaled in place.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator

import torch
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

__all__ = ["clip_grad_norm_", "lay_out_gradients"]


def clip_grad_norm_(
    parameters: Iterable[torch.Tensor],
    max_norm: float,
    *,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """See `hp_protocols.distributed.clip_grad_norm_`."""
    given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    lay_out_gradients(given)
    groups = _by_mesh(given)
    norms = [_norm([p.grad for p in group if p.grad is not None], foreach) for group in groups]
    # One mesh is the common case and must give torch's own bits; a norm of one norm would round once more.
    total = norms[0] if len(norms) == 1 else _norm_of_norms(norms)
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(f"the global gradient norm is {total.item()}, so gradients cannot be clipped to {max_norm}")
    for group in groups:
        clip_grads_with_norm_(group, max_norm, total, foreach)
    return total


def lay_out_gradients(parameters: Iterable[torch.Tensor]) -> None:
    """See `hp_protocols.distributed.lay_out_gradients`."""
    for parameter in parameters:
        grad = parameter.grad
        if isinstance(grad, DTensor) and isinstance(parameter, DTensor) and grad.placements != parameter.placements:
            parameter.grad = grad.redistribute(placements=parameter.placements)


def _by_mesh(parameters: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Parameters with gradients, grouped by their gradient's mesh: torch combines norms on one mesh only."""
    groups: dict[object, list[torch.Tensor]] = {}
    for parameter in parameters:
        if (grad := parameter.grad) is not None:
            groups.setdefault(grad.device_mesh if isinstance(grad, DTensor) else None, []).append(parameter)
    return list(groups.values())


def _norm(grads: list[torch.Tensor], foreach: bool | None) -> torch.Tensor:
    with _one_axis_after_the_other():
        norm = get_total_norm(grads, 2.0, False, foreach)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm


@contextlib.contextmanager
def _one_axis_after_the_other() -> Iterator[None]:
    """Without torch's warning, on every rank, that a norm over several mesh axes takes a collective for each: the user
    cannot change it, and all ranks get the same bits, since the ranks of an axis sum the same numbers."""
    logger = logging.getLogger("torch.distributed.tensor._redistribute")
    logger.addFilter(_says_more)
    try:
        yield
    finally:
        logger.removeFilter(_says_more)


def _says_more(record: logging.LogRecord) -> bool:
    return not record.msg.startswith("While redistributing from")


def _norm_of_norms(norms: list[torch.Tensor]) -> torch.Tensor:
    if not norms:
        return torch.tensor(0.0)
    return torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]), 2.0)
