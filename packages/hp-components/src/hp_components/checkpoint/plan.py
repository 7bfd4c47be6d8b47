"""Who writes what in a save: planned once with torch.distributed.checkpoint, and kept while the layout stays.

In: a tree of live tensors and packed states. Out: a `WritePlan`: the pieces that this rank writes. Planning exchanges
every name between the ranks, which costs more than writing small tensors; the second save skips it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, Metadata, SavePlan
from torch.distributed.tensor import DTensor

from hp_components.checkpoint.agreement import on_all_ranks
from hp_protocols.platform import get_platform

__all__ = ["PlanCache", "WritePlan", "gather_on_rank_zero", "layout_of"]

Tree = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class WritePlan:
    """What one rank writes.

    Attributes:
        local: the pieces of this rank; of what several ranks hold, one of them writes each piece.
        metadata: what the whole checkpoint holds; on rank 0 only.
    """

    local: SavePlan
    metadata: Metadata | None


class PlanCache:
    """The plan of the last save, used again while every rank holds the same names, shapes, types and placements."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self._signature: list[tuple[Any, ...]] | None = None
        self._plan: WritePlan | None = None

    def plan(
        self, contents: Tree, writer: FileSystemWriter, signature: list[tuple[Any, ...]], *, known: bool
    ) -> tuple[WritePlan, DefaultSavePlanner]:
        """The plan for `contents`, and the planner that finds the data of its pieces.

        Args:
            contents: this rank's tree.
            writer: of the folder that is to be written.
            signature: `layout_of(contents)`.
            known: whether `knows` was true on every rank.
        """
        platform = get_platform()
        planner = DefaultSavePlanner()
        planner.set_up_planner(dict(contents), writer.storage_meta(), is_coordinator=platform.rank() == 0)
        if not known or self._plan is None:
            self._plan = self._make(planner, writer)
            self._signature = signature
        return self._plan, planner

    def knows(self, signature: list[tuple[Any, ...]]) -> bool:
        """Whether this rank's part of the last plan is good for this layout too."""
        return self._plan is not None and self._signature == signature

    def _make(self, planner: DefaultSavePlanner, writer: FileSystemWriter) -> WritePlan:
        local = on_all_ranks(
            "plan the save", lambda: writer.prepare_local_plan(planner.create_local_plan()), self.group
        )
        everyones = gather_on_rank_zero(local, self.group)

        def decide() -> tuple[list[SavePlan], Metadata] | None:
            if everyones is None:
                return None
            plans, metadata = planner.create_global_plan(everyones)
            return writer.prepare_global_plan(plans), metadata

        decided = on_all_ranks("plan the save", decide, self.group)
        mine = _scatter_from_rank_zero(decided[0] if decided else None, self.group)
        return WritePlan(planner.finish_plan(mine), decided[1] if decided else None)


def layout_of(contents: Tree) -> list[tuple[Any, ...]]:
    """Everything about a tree that a plan depends on."""
    return [(part, *_layout(name, value)) for part, values in contents.items() for name, value in values.items()]


def _layout(name: str, value: Any) -> tuple[Any, ...]:
    if isinstance(value, DTensor):
        return name, value.shape, value.dtype, value.placements, value.device_mesh
    if isinstance(value, torch.Tensor):
        return name, value.shape, value.dtype
    return (name,)


def gather_on_rank_zero(value: Any, group: dist.ProcessGroup | None) -> list[Any] | None:
    """Every rank's `value` on rank 0, None elsewhere."""
    platform = get_platform()
    if not platform.is_initialized():
        return [value]
    gathered: list[Any] | None = [None] * platform.world_size(group) if platform.rank() == 0 else None
    dist.gather_object(value, gathered, group=group, group_dst=0)
    return gathered


def _scatter_from_rank_zero(values: list[Any] | None, group: dist.ProcessGroup | None) -> Any:
    if not get_platform().is_initialized():
        assert values is not None
        return values[0]
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, values, group=group, group_src=0)
    return mine[0]
