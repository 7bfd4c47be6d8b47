"""Buckets: which gradients are reduced together, and where each lies in the buffer.

In: units, the parameters that have a gradient, the config. Out: `ReductionBucket`s and their layout, which is FSDP2's.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass

import torch

from hp_compile.mesh import DataParallelMesh
from hp_compile.pass_config import PassConfig
from hp_compile.passes.parallel.shards import rows_of
from hp_compile.passes.parallel.units import Unit
from hp_compile.tracer.state import StateSlot, shard_info


@dataclass(frozen=True)
class ReductionBucket:
    """Gradients that are reduced by one collective (two in hsdp)."""

    unit: str
    params: tuple[str, ...]
    sharded: bool
    reduce_dtype: torch.dtype
    master_dtype: torch.dtype


def reduction_buckets(
    units: list[Unit],
    present: Container[str],
    slots: dict[str, StateSlot],
    config: PassConfig,
    dtype_of: Callable[[str], torch.dtype],
) -> list[ReductionBucket]:
    """One bucket per unit, kind and dtype, in the order in which backward reaches units."""
    buckets = []
    for unit in units:
        groups: dict[tuple[bool, torch.dtype, torch.dtype], list[str]] = {}
        for fqn in unit.params:
            if fqn in present:
                info = shard_info(slots[fqn].tensor)
                key = (bool(info and info.sharded), dtype_of(fqn), slots[fqn].tensor.dtype)
                groups.setdefault(key, []).append(fqn)
        for (sharded, reduce_dtype, master), fqns in groups.items():
            for part in split_by_size(fqns, slots, config.bucket_mb):
                buckets.append(ReductionBucket(unit.fqn, tuple(part), sharded, reduce_dtype, master))
    return buckets


def split_by_size(fqns: list[str], slots: dict[str, StateSlot], bucket_mb: float | None) -> list[list[str]]:
    """Cut a unit at parameter boundaries so that a bucket stays within `bucket_mb` (at least one parameter)."""
    if bucket_mb is None:
        return [fqns]
    parts: list[list[str]] = []
    filled = 0.0
    for fqn in fqns:
        slot = slots[fqn]
        size = slot.full_shape.numel() * slot.tensor.element_size() / 2**20
        if not parts or filled + size > bucket_mb:
            parts.append([])
            filled = 0.0
        parts[-1].append(fqn)
        filled += size
    return parts


def reduction_layout(
    bucket: ReductionBucket, slots: dict[str, StateSlot], mesh: DataParallelMesh
) -> tuple[int, int, list[list[int]], list[int]]:
    """Chunks, elements of the whole buffer, shape of each local gradient, its offset in the reduced buffer."""
    chunks = mesh.shard_size if bucket.sharded else 1
    shapes: list[list[int]] = []
    offsets: list[int] = []
    row_elements = 0
    for fqn in bucket.params:
        full = slots[fqn].full_shape
        offsets.append(row_elements)
        if not full:
            shapes.append([])
            row_elements += 1
            continue
        rows = full[0]
        if bucket.sharded:
            assert mesh.shard is not None
            rows = rows_of(full[0], chunks, mesh.shard.rank)[1]
        shapes.append([rows, *full[1:]])
        row_elements += -(-full[0] // chunks) * full[1:].numel()
    return chunks, row_elements * chunks, shapes, offsets
