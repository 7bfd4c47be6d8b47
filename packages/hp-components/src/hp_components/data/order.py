"""The global order of rows, and which part of it each rank takes.

In: a number of rows, a seed, this rank's place. Out: row numbers, batch by batch, from any position on. A position
means the same for every number of ranks and workers.

Global batch b of an epoch is rows cursor … cursor + local_batch_size × dp_world_size of the epoch's order; rank r takes
the r-th part of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hp_components.data.packing import PADDING_ROW

__all__ = ["Position", "RankSlice", "RowOrder"]


@dataclass(frozen=True, slots=True)
class Position:
    """A place in the global order: the epoch, and how many of its rows are done."""

    epoch: int = 0
    cursor: int = 0


@dataclass(frozen=True, slots=True)
class RankSlice:
    """Which part of every global batch a rank takes."""

    local_batch_size: int
    dp_rank: int = 0
    dp_world_size: int = 1

    def __post_init__(self) -> None:
        if self.local_batch_size < 1 or self.dp_world_size < 1:
            raise ValueError(f"local_batch_size and dp_world_size must be at least 1, got {self}")
        if not 0 <= self.dp_rank < self.dp_world_size:
            raise ValueError(f"dp_rank must lie in [0, dp_world_size), got {self}")

    @property
    def global_batch_size(self) -> int:
        return self.local_batch_size * self.dp_world_size


@dataclass(frozen=True, slots=True)
class RowOrder:
    """The order of the rows in each epoch.

    Attributes:
        rows: how many there are; None: endlessly many, in the order of their numbers, all in epoch 0.
        shuffle: a new order in every epoch, a function of `seed` and the epoch; otherwise by number.
        epochs: end after this many; None: never.
    """

    rows: int | None
    shuffle: bool
    seed: int
    epochs: int | None = None

    def batches(self, position: Position, part: RankSlice) -> Iterator[list[int]]:
        """This rank's row numbers, batch by batch, from a position on.

        Where an epoch's rows do not fill its last global batch, PADDING_ROW does.
        """
        order, epoch = self._epoch(position.epoch), position.epoch
        while not self.is_over(position):
            if epoch != position.epoch:
                order, epoch = self._epoch(position.epoch), position.epoch
            first = position.cursor + part.dp_rank * part.local_batch_size
            wanted = range(first, first + part.local_batch_size)
            yield [int(order[i]) if i < len(order) else PADDING_ROW for i in wanted]
            position = self.after(position, part)

    def after(self, position: Position, part: RankSlice) -> Position:
        """The position one global batch on."""
        cursor = position.cursor + part.global_batch_size
        if self.rows is not None and cursor >= self.rows:
            return Position(position.epoch + 1, 0)
        return Position(position.epoch, cursor)

    def is_over(self, position: Position) -> bool:
        """Whether nothing comes after `position`."""
        return self.epochs is not None and position.epoch >= self.epochs

    def _epoch(self, epoch: int) -> Sequence[int] | np.ndarray:
        if self.rows is None:
            return range(2**63 - 1)
        if not self.shuffle:
            return range(self.rows)
        # numpy promises the raw stream of a bit generator for all its versions, and that of `permutation` for none.
        keys = np.random.PCG64(np.random.SeedSequence([self.seed, epoch])).random_raw(self.rows)
        return np.argsort(keys, kind="stable")
