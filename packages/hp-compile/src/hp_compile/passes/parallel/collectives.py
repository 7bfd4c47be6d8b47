"""What happens right before and after a collective, as plain functions that stand in the graph.

In: shards or gradients. Out: what the collective sends, or views of what it returned. The layout of reductions is
FSDP2's: row r of the buffer is chunk r of every gradient, each chunk padded to ceil(rows / ranks).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from hp_compile import _torch_compat as compat
from hp_compile.tracer.state import contiguous_stride

CommKind = Literal["all_gather", "reduce_scatter", "all_reduce"]
CommStage = Literal["prepare", "launch", "wait", "finish"]


@dataclass(frozen=True)
class CommTag:
    """Stands in `node.meta["hp_comm"]` of every node that belongs to a collective (G15).

    Attributes:
        bucket: number of the collective in this graph; its nodes share it.
        nbytes: of the whole gathered or reduced buffer.
    """

    kind: CommKind
    stage: CommStage
    unit: str
    region: Literal["forward", "backward"]
    bucket: int
    axis: str = ""
    dtype: str = ""
    numel: int = 0
    nbytes: int = 0


def gather_inputs(shards: Sequence[torch.Tensor], rows: Sequence[int], dtype: torch.dtype) -> list[torch.Tensor]:
    """Shards in the dtype to be gathered, each padded to the common number of rows."""
    sizes = [count * _row(shard) for shard, count in zip(shards, rows, strict=True)]
    flat = shards[0].new_empty(sum(sizes), dtype=dtype)
    targets = []
    for shard, count, part in zip(shards, rows, flat.split(sizes), strict=True):
        block = part.view(count, *shard.shape[1:])
        targets.append(block)
        if shard.shape[0] < count:
            block[shard.shape[0] :].zero_()
    filled = [(block[: shard.shape[0]], shard) for block, shard in zip(targets, shards, strict=True) if shard.numel()]
    if filled:
        compat.copy_each([target for target, _ in filled], [source for _, source in filled])
    return targets


def _row(shard: torch.Tensor) -> int:
    size = 1
    for extent in shard.shape[1:]:
        size *= extent
    return size


def reduction_input(
    grads: Sequence[torch.Tensor], chunks: int, numel: int, dtype: torch.dtype, predivide: float
) -> torch.Tensor:
    """One buffer of all gradients, rank-major, in the dtype of the reduction."""
    flat = grads[0].new_empty(numel, dtype=dtype)
    rows = [grad if grad.dim() else grad.view(1) for grad in grads]
    compat.chunk_cat(rows, chunks, flat.view(chunks, -1))
    return flat.div_(predivide) if predivide != 1 else flat


def gradient_views(
    flat: torch.Tensor,
    shapes: Sequence[Sequence[int]],
    offsets: Sequence[int],
    dtype: torch.dtype,
    postdivide: float,
) -> list[torch.Tensor]:
    """The reduced gradients as disjoint views of the reduced buffer, in the parameters' own dtype."""
    if postdivide != 1:
        flat.div_(postdivide)
    if flat.dtype != dtype:
        flat = flat.to(dtype)
    views = []
    for shape, offset in zip(shapes, offsets, strict=True):
        views.append(flat.as_strided(shape, contiguous_stride(shape), offset))
    return views


# Functions that only compute: a node of theirs that nobody reads may go.
PURE_FUNCTIONS = frozenset({gather_inputs, reduction_input, gradient_views})


@dataclass(frozen=True)
class Reduction:
    """How one bucket of gradients is reduced over the data-parallel mesh.

    Attributes:
        op: of the collectives, `"avg"` or `"sum"`.
        predivide, postdivide: FSDP2's factors for dtypes that would overflow; 1 means none.
    """

    op: str
    predivide: float
    postdivide: float


def reduction_for(grad_reduce: str, dtype: torch.dtype, ranks: int) -> Reduction:
    """float32 and bfloat16 leave the division to the collective; others divide by about sqrt(n) before and after."""
    if grad_reduce == "sum" or ranks == 1:
        return Reduction("sum", 1.0, 1.0)
    if dtype in (torch.float32, torch.bfloat16):
        return Reduction("avg", 1.0, 1.0)
    before = 1
    while ranks % before == 0 and ranks / before > before:
        before *= 2
    return Reduction("sum", float(before), ranks / before)
