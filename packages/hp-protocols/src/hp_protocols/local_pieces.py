"""Which part of a whole tensor a rank holds, for any placements of a distributed tensor.

In: a whole tensor, placements, the mesh's shape and a rank's coordinate in it. Out: the rank's local tensor, cut
without communication. Covers uneven shards and the strided shards of FSDP over tensor parallelism.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .platform import Tensor
    from .types import Placement

__all__ = ["local_piece"]


def local_piece(
    whole: Tensor, placements: Sequence[Placement], mesh_shape: Sequence[int], coordinate: Sequence[int]
) -> Tensor:
    """A view of the part of `whole` that lies at `coordinate` of the mesh; empty where shards run out.

    Raises:
        ValueError: a placement that does not cut a tensor into parts (`Partial`), or is unknown.
    """
    piece = whole
    for tensor_dim, axes in _cuts(placements, mesh_shape, whole.ndim).items():
        for axis in axes:
            piece = _chunk(piece, tensor_dim, mesh_shape[axis], coordinate[axis])
    return piece


def _cuts(placements: Sequence[Placement], mesh_shape: Sequence[int], ndim: int) -> dict[int, list[int]]:
    """For each tensor dim the mesh axes that cut it, in the order in which they cut.

    Axes cut from left to right, but a strided shard cuts after axes to its right: FSDP shards what tensor parallelism
    has already sharded, though its axis stands before. Its `split_factor` is the number of pieces it finds.
    """
    cuts: dict[int, list[int]] = {}
    for axis in reversed(range(len(placements))):
        placement: Any = placements[axis]
        if placement.is_replicate():
            continue
        if placement.is_partial() or not hasattr(placement, "dim"):
            raise ValueError(f"a whole tensor cannot be laid out as {placement!r}")
        order = cuts.setdefault(placement.dim % ndim, [])
        order.insert(_position(getattr(placement, "split_factor", 1), order, mesh_shape, placement), axis)
    return cuts


def _position(split_factor: int, order: Sequence[int], mesh_shape: Sequence[int], placement: Placement) -> int:
    for position in range(len(order) + 1):
        if math.prod(mesh_shape[axis] for axis in order[:position]) == split_factor:
            return position
    raise ValueError(f"{placement!r} does not fit the mesh axes {tuple(mesh_shape)}")


def _chunk(tensor: Tensor, dim: int, count: int, index: int) -> Tensor:
    # As torch.chunk cuts: every piece but the last ones has the same size, the last ones may be short or empty.
    size = tensor.shape[dim]
    step = -(-size // count)
    start = min(size, index * step)
    return tensor.narrow(dim, start, min(size, start + step) - start)
