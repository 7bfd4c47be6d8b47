"""Cross-entropy of logits that are cut along the vocabulary, without ever gathering them (loss parallel).

In: this rank's columns of the logits, whole labels, the group of ranks that share the vocabulary. Out: the sum over
valid tokens, the same on every rank of the group. Three numbers per token are exchanged: maximum, sum of
exponentials, logit of the label. Shape suffixes: N tokens, V this rank's part of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Shard

from hp_components._torch_compat import require
from hp_protocols.platform import get_platform

__all__ = ["VocabularyPart", "local_logits", "parallel_cross_entropy_sum"]


@dataclass(frozen=True, slots=True)
class VocabularyPart:
    """Which columns of the vocabulary this rank holds (from `first` on), and the group with whom it shares them."""

    group: Any
    first: int
    vocab_size: int


def local_logits(logits: DTensor) -> tuple[Tensor, VocabularyPart | None]:
    """This rank's part of distributed logits [..., V], and where it lies; None if it has the whole vocabulary.

    Raises:
        ValueError: the logits are partial sums, or cut along the vocabulary on two mesh axes.
    """
    mesh, vocabulary = logits.device_mesh, logits.ndim - 1
    if any(placement.is_partial() for placement in logits.placements):
        raise ValueError(f"logits are partial sums ({logits.placements}): the output projection has to reduce them")
    # A negative dim means the same; `Shard` does not normalise it.
    cut = [
        axis
        for axis, placement in enumerate(logits.placements)
        if isinstance(placement, Shard) and placement.dim % logits.ndim == vocabulary
    ]
    local = logits.to_local()
    if not cut:
        return local, None
    if len(cut) > 1:
        raise ValueError(f"logits are cut along the vocabulary on {len(cut)} mesh axes: {logits.placements}")
    (axis,) = cut
    # Shard cuts as torch.chunk does: equal parts, the last ones smaller or empty.
    width = -(-logits.shape[-1] // mesh.size(axis))
    first = min(width * mesh.get_local_rank(axis), logits.shape[-1])
    return local, VocabularyPart(mesh.get_group(axis), first, logits.shape[-1])


def parallel_cross_entropy_sum(logits_NV: Tensor, labels_N: Tensor, part: VocabularyPart, ignore_index: int) -> Tensor:
    """The cross-entropy summed over valid tokens, 0-d, in float32 (float64 if the logits are).

    Raises:
        RuntimeError: a label outside the vocabulary (on the cpu; elsewhere the loss is NaN, since an assertion there
            takes the device with it).
    """
    result: Tensor = _ParallelCrossEntropy.apply(logits_NV, labels_N, part, ignore_index)
    return result


class _ParallelCrossEntropy(torch.autograd.Function):
    """Keeps the logits as they came in and one number per token; the softmax is computed again in backward."""

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, labels_N: Tensor, part: VocabularyPart, ignore_index: int) -> Tensor:
        platform = get_platform()
        precise_NV = _precise(logits_NV)
        valid_N = labels_N != ignore_index
        wrong_N = valid_N & ((labels_N < 0) | (labels_N >= part.vocab_size))
        if labels_N.device.type == "cpu":
            message = f"a label is outside the vocabulary of {part.vocab_size} (ignored: {ignore_index})"
            require(~wrong_N.any(), message)
        # A rank may hold no column at all.
        max_N = precise_NV.amax(-1) if precise_NV.shape[-1] else precise_NV.new_full(labels_N.shape, -torch.inf)
        platform.all_reduce(max_N, "max", group=part.group)
        column_N, owned_N = _columns(labels_N, part, logits_NV.shape[-1])
        exchanged_2N = torch.stack(
            [(precise_NV - max_N.unsqueeze(-1)).exp().sum(-1), _label_logits(precise_NV, column_N, owned_N)]
        )
        platform.all_reduce(exchanged_2N, group=part.group)
        logsumexp_N = exchanged_2N[0].log() + max_N
        ctx.save_for_backward(logits_NV, logsumexp_N, column_N, owned_N & valid_N, valid_N)
        losses_N = torch.where(valid_N, logsumexp_N - exchanged_2N[1], 0.0)
        return torch.where(wrong_N, torch.nan, losses_N).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        logits_NV, logsumexp_N, column_N, owned_N, valid_N = ctx.saved_tensors
        grad_NV = (_precise(logits_NV) - logsumexp_N.unsqueeze(-1)).exp_()
        if grad_NV.shape[-1]:
            grad_NV.scatter_add_(-1, column_N.unsqueeze(-1), -owned_N.to(grad_NV.dtype).unsqueeze(-1))
        # Where, not times: an ignored token's gradient is 0 also where its logits are not finite.
        grad_NV = torch.where(valid_N.unsqueeze(-1), grad_NV * grad, 0.0)
        return grad_NV.to(logits_NV.dtype), None, None, None


def _precise(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _columns(labels_N: Tensor, part: VocabularyPart, width: int) -> tuple[Tensor, Tensor]:
    """The local column of each label (0 where another rank has it), and whether it is here."""
    column_N = labels_N - part.first
    owned_N = (column_N >= 0) & (column_N < width)
    return torch.where(owned_N, column_N, 0), owned_N


def _label_logits(logits_NV: Tensor, column_N: Tensor, owned_N: Tensor) -> Tensor:
    if not logits_NV.shape[-1]:
        return logits_NV.new_zeros(column_N.shape)
    return torch.where(owned_N, logits_NV.gather(-1, column_N.unsqueeze(-1)).squeeze(-1), 0.0)
