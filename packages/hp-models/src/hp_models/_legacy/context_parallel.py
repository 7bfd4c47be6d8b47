"""Context parallelism of a bare model: each rank computes a stretch of every row.

In: a model, the modules that mix tokens, a mesh axis. Out: the same model; it takes whole rows and gives the logits of
its own stretch. Contiguous stretches, in the order of the ranks.

Attention gathers keys and values. Gated DeltaNet exchanges what its state becomes, not the state: a stretch maps the
matrix M that it begins with to M' = A M + G, so every rank finds A and G of its stretch at once, and M afterwards.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from hp_models._legacy.qwen3_5 import AttentionCore, Chunks, DeltaCore, Qwen3_5, causal_mask, run_chunks
from hp_protocols.distributed import SequenceAxis
from hp_protocols.platform import F, ops

if TYPE_CHECKING:
    from torch import Tensor

    from hp_protocols.platform import DeviceMesh

__all__ = ["MIXING", "apply_context_parallel"]

MIXING = (AttentionCore, DeltaCore)
"""Modules in which a token meets other ones; all others work on a stretch as they are."""


def apply_context_parallel(model: Qwen3_5, names: Iterable[str], mesh: DeviceMesh) -> None:
    """Let the model compute stretches; in place. `names`: its modules of the classes `MIXING`."""
    axis = SequenceAxis(mesh)
    # Any: a module becomes one of its class's variant for stretches.
    every: list[Any] = [model, *map(model.get_submodule, names)]
    variants = {Qwen3_5: Qwen3_5OfStretch, AttentionCore: AttentionOfStretch, DeltaCore: DeltaOfStretch}
    for module in every:
        module.__class__ = variants[type(module)]
        module.axis = axis


class Qwen3_5OfStretch(Qwen3_5):
    axis: SequenceAxis

    def part_of_rows(self, rows: Tensor) -> Tensor:
        return self.axis.cut(rows, 1)

    def masks(self, ids: Tensor, padding: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Always a mask, whose rows are this stretch's queries: what they see does not start at their own place."""
        whole = causal_mask(ops.ones_like(ids[:1]) if padding is None else padding)
        return self.axis.cut(whole, 2), None if padding is None else self.axis.cut(padding, 1)


class AttentionOfStretch(AttentionCore):
    axis: SequenceAxis

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return super().forward(q, self.axis.gather(k, 1), self.axis.gather(v, 1), mask)


class DeltaOfStretch(DeltaCore):
    axis: SequenceAxis

    def tokens_before(self, x: Tensor, count: int) -> Tensor:
        """From the ranks before; zeros before the first. A stretch may be shorter than what a convolution reaches."""
        own = min(count, x.shape[1])
        ends = F.pad(self.axis.gather(x[:, x.shape[1] - own :].contiguous(), 1), (0, 0, count, 0))
        return ends.narrow(1, self.axis.rank * own, count)

    def scan(self, chunks: Chunks) -> Tensor:
        """One scan of V + E columns from the state [0 | I] gives outputs and state without M, and what M adds."""
        key_width, value_width = chunks.write.shape[-1], chunks.gain.shape[-1]
        unit = ops.eye(key_width, dtype=chunks.gain.dtype, device=chunks.gain.device)
        start = F.pad(unit, (value_width, 0)).expand(chunks.gain.shape[1], -1, -1)
        wider = dataclasses.replace(chunks, gain=F.pad(chunks.gain, (0, key_width)))
        out, end = run_chunks(wider, start)
        own, reach = out.split((value_width, key_width), dim=-1)
        state = self.state_before(end, value_width).unflatten(0, (chunks.rows, -1))
        return own + (reach.transpose(1, 2) @ state).transpose(1, 2)

    def state_before(self, end: Tensor, value_width: int) -> Tensor:
        """M [B · heads, E, V] of this stretch, from [G | A] of every one. Each rank computes all of them, so that
        the gathering's backward pass, which all have to join, finds a gradient on every rank."""
        gains, maps = self.axis.gather_each(end.contiguous()).split((value_width, end.shape[-1] - value_width), dim=-1)
        states = [ops.zeros_like(gains[0])]
        for rank in range(self.axis.size - 1):
            states.append(maps[rank] @ states[rank] + gains[rank])
        return ops.stack(states)[self.axis.rank]
