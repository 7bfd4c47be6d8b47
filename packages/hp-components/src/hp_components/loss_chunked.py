"""Cross-entropy in chunks of the sequence: the logits [B, S, V] never exist as a whole.

In: a model that hands its last hidden states and its output projection to a function. Out: the same sum and the same
gradients as `CrossEntropyLoss`, with the memory of one chunk of logits. Shape suffixes: B rows, S positions (of this
rank), D width, V vocabulary.

Why gradients are computed in forward: a chunk's logits are needed twice, for the loss and for its gradient. Doing both
at once needs neither their memory nor a second product; what is kept for backward is the gradient of the hidden
states and one gradient of the projection. Why the projection is not called as a module: data parallelism gathers its
weights and reduces its gradients around a call, which would happen for every chunk. Here that happens once: the weights
are gathered already when the chunks begin, and their gradient reaches autograd as a whole.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from hp_components.loss import CrossEntropyLoss
from hp_protocols.errors import ConfigError, Fault

__all__ = ["ChunkedCELoss"]

SEQUENCE = 1
"""Tensor dim of the positions in hidden states [B, S, D] and labels [B, S]."""


class ChunkedCELoss(CrossEntropyLoss):
    """`CrossEntropyLoss` for large vocabularies. Gradients can be taken once; they do not depend on the chunks.

    The model's `forward` must take `output_fn`, a function of its output projection and its last hidden states, call
    it in place of the projection and return what it returns (`Decoder` of hp-models does). Hooks that others have put
    on the projection are not called.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CrossEntropyLoss.Config):
        num_chunks: int = 8
        """Parts into which each row is cut; the logits of one part exist at a time."""

        def faults(self, path: str) -> list[Fault]:
            """A number of chunks that cannot be."""
            if self.num_chunks >= 1:
                return []
            return [Fault(f"{path}.num_chunks", f"{self.num_chunks} is no number of parts", allowed="at least 1")]

    def __init__(self, config: CrossEntropyLoss.Config) -> None:
        super().__init__(config)
        self.num_chunks = config.num_chunks

    def run_model(self, model: nn.Module, labels_BS: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        loss: Tensor = model(*args, output_fn=partial(self._over_chunks, labels_BS), **kwargs)
        return loss

    def check_model(self, model: nn.Module) -> None:
        if "output_fn" not in inspect.signature(model.forward).parameters:
            raise ConfigError(
                Fault(
                    "loss",
                    f"ChunkedCELoss needs a model whose forward takes output_fn; {type(model).__name__} takes none",
                    hint="use CrossEntropyLoss with num_chunks=0",
                )
            )

    def _over_chunks(self, labels_BS: Tensor, lm_head: nn.Module, hidden_BSD: Tensor) -> Tensor:
        """The loss of hidden states under a projection; what the model calls."""
        if isinstance(lm_head, FSDPModule):
            # Without effect where the unit's first module has gathered it, as in a unit of norm and projection.
            lm_head.unshard()
        layout = _Layout.of(hidden_BSD)
        local_BSD = hidden_BSD.to_local() if isinstance(hidden_BSD, DTensor) else hidden_BSD
        chunks = layout.chunks(labels_BS, local_BSD.shape[SEQUENCE], self.num_chunks)

        def loss_of(chunk_BSD: Tensor, labels_BS: Tensor) -> Tensor:
            # forward, and not the module itself: see the module's docstring.
            return self(lm_head.forward(layout.distributed(chunk_BSD)), labels_BS)

        if not torch.is_grad_enabled():
            # Here, since a Function is told that its inputs need gradients whether or not they are recorded.
            pieces = local_BSD.split([chunk.stop - chunk.start for chunk in chunks], SEQUENCE)
            losses = [loss_of(piece_BSD, chunk.labels_BS) for piece_BSD, chunk in zip(pieces, chunks, strict=True)]
            return torch.stack(losses).sum()
        weights = [weight for weight in lm_head.parameters() if weight.requires_grad]
        loss: Tensor = _ChunkedSum.apply(local_BSD, chunks, loss_of, *weights)
        return loss


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Positions `start` to `stop` of this rank's hidden states, and the labels that belong to them on all ranks that
    share the sequence."""

    start: int
    stop: int
    labels_BS: Tensor


@dataclass(frozen=True, slots=True)
class _Layout:
    """How the hidden states lie on the mesh of tensor parallelism; `shares` ranks have a stretch of each row."""

    mesh: Any
    placements: tuple[Any, ...]
    shares: int

    @classmethod
    def of(cls, hidden_BSD: Tensor) -> _Layout:
        """The layout of hidden states, distributed or plain.

        Raises:
            ValueError: they are partial sums, or a row is not cut evenly.
        """
        if not isinstance(hidden_BSD, DTensor):
            return cls(None, (), 1)
        mesh, placements, shares = hidden_BSD.device_mesh, tuple(hidden_BSD.placements), 1
        for axis, placement in enumerate(placements):
            if placement.is_partial() or (isinstance(placement, Shard) and placement.dim != SEQUENCE):
                raise ValueError(f"hidden states lie as {placements}: allowed are whole rows or stretches of rows")
            if isinstance(placement, Shard):
                shares *= mesh.size(axis)
        if hidden_BSD.shape[SEQUENCE] % shares:
            raise ValueError(f"rows of {hidden_BSD.shape[SEQUENCE]} positions are not cut evenly over {shares} ranks")
        return cls(mesh, placements, shares)

    def distributed(self, chunk_BSD: Tensor) -> Tensor:
        """A chunk as the projection expects it: laid out like the hidden states it was cut from."""
        if self.mesh is None:
            return chunk_BSD
        return DTensor.from_local(chunk_BSD, self.mesh, self.placements, run_check=False)

    def chunks(self, labels_BS: Tensor, local_length: int, count: int) -> list[_Chunk]:
        """At most `count` chunks of this rank's positions.

        Where ranks share a row, a chunk is one piece of every rank's stretch; so the ranks exchange in all what they
        would exchange without chunks, and no rank ever holds whole rows of hidden states.
        """
        if labels_BS.shape[SEQUENCE] != local_length * self.shares:
            raise ValueError(
                f"labels {tuple(labels_BS.shape)} do not fit hidden states of {local_length * self.shares} positions"
            )
        stretches = labels_BS.unflatten(SEQUENCE, (self.shares, local_length))
        size = max(1, -(-local_length // count))
        starts = range(0, local_length, size)
        return [
            _Chunk(start, min(start + size, local_length), stretches[:, :, start : start + size].flatten(1))
            for start in starts
        ]


class _ChunkedSum(torch.autograd.Function):
    """The sum of the chunks' losses; its gradients are made on the way (see the module's docstring)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_BSD: Tensor,
        chunks: Sequence[_Chunk],
        loss_of: Callable[[Tensor, Tensor], Tensor],
        *weights: Tensor,
    ) -> Tensor:
        wanted = [weight for weight, needed in zip(weights, ctx.needs_input_grad[3:], strict=True) if needed]
        hidden_needed = ctx.needs_input_grad[0]
        total = hidden_BSD.new_zeros((), dtype=_precise(hidden_BSD.dtype))
        grad_BSD = torch.empty_like(hidden_BSD) if hidden_needed else None
        grads: list[Tensor | None] = [None] * len(wanted)
        for chunk in chunks:
            piece_BSD = hidden_BSD[:, chunk.start : chunk.stop].detach().requires_grad_(hidden_needed)
            inputs = [*([piece_BSD] if hidden_needed else []), *wanted]
            with torch.set_grad_enabled(bool(inputs)):
                loss = loss_of(piece_BSD, chunk.labels_BS)
            total += loss.detach()
            if not inputs:
                continue
            # Straight to where they belong: neither hooks on the weights nor their .grad are touched.
            found = list(torch.autograd.grad(loss, inputs, allow_unused=True))
            if grad_BSD is not None:
                grad_BSD[:, chunk.start : chunk.stop] = found.pop(0)
            for index, grad in enumerate(found):
                grads[index] = _added(grads[index], grad)
        ctx.gradients = [grad_BSD, *_at_their_places(grads, wanted, ctx.needs_input_grad[3:])]
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("gradients of a ChunkedCELoss can be taken once; call it again for another backward")
        gradients, ctx.gradients = ctx.gradients, None
        for gradient in gradients:
            if gradient is not None:
                local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
                local.mul_(grad)
        hidden, *weights = gradients
        return (hidden, None, None, *weights)


def _precise(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _added(total: Tensor | None, grad: Tensor | None) -> Tensor | None:
    """Half-precision gradients are summed in float32, as one product over all chunks would."""
    if grad is None:
        return total
    if total is None:
        return grad.to(_precise(grad.dtype))
    return total.add_(grad)


def _at_their_places(
    grads: Sequence[Tensor | None], weights: Sequence[Tensor], needed: Sequence[bool]
) -> list[Tensor | None]:
    """One entry per weight, in the weight's dtype; None where no gradient is needed."""
    found = iter([None if grad is None else grad.to(w.dtype) for grad, w in zip(grads, weights, strict=True)])
    return [next(found) if need else None for need in needed]
