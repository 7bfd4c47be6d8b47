"""Clip gradients by their global norm; before that, sum what is still a partial sum over ranks.

In: parameters with gradients, plain or distributed over any mixture of meshes. Out: the true global norm, the same on
every rank; the gradients are scaled in place.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from hp_protocols.platform import Capability, get_platform

if TYPE_CHECKING:
    from hp_protocols.platform import Tensor

__all__ = ["clip_grad_norm_", "lay_out_gradients"]


def clip_grad_norm_(
    parameters: Iterable[Tensor],
    max_norm: float,
    *,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Multiply all gradients by min(1, max_norm / (norm + 1e-6)), with their 2-norm over all parameters and ranks.

    Args:
        parameters: each once; those without gradients do not count. Plain gradients are taken to be the same on every
            rank, as after an all-reduce. A distributed gradient that is not laid out as its parameter (a partial sum
            over tensor-parallel ranks) is so afterwards.
        max_norm: infinity measures without scaling.
        error_if_nonfinite: raise before anything is scaled, instead of scaling by a norm that is no number.
        foreach: use the batched kernels; None: where the device has them.

    Returns:
        the norm before scaling, a plain 0-d tensor on the gradients' device. For gradients on one mesh it is torch's
        own `clip_grad_norm_`, bit for bit.

    Raises:
        RuntimeError: the norm is not finite and `error_if_nonfinite`.
        CapabilityError: the platform cannot clip.
    """
    platform = get_platform()
    platform.require(Capability.GRAD_CLIPPING, "clip_grad_norm_")
    return platform.clip_grad_norm_(parameters, max_norm, error_if_nonfinite=error_if_nonfinite, foreach=foreach)


def lay_out_gradients(parameters: Iterable[Tensor]) -> None:
    """Sum gradients that are still partial sums over ranks, and cut those of cut parameters.

    Tensor parallelism without data parallelism leaves them so after backward; FSDP and replication lay them out as they
    reduce them, once per micro-batch. `clip_grad_norm_` does it too. Between two micro-batches it makes the sum the one
    that those, and a captured step, give: of whole gradients, to the last bit.

    Raises:
        CapabilityError: the platform has no distributed gradients.
    """
    platform = get_platform()
    platform.require(Capability.GRAD_CLIPPING, "lay_out_gradients")
    platform.lay_out_gradients(parameters)
