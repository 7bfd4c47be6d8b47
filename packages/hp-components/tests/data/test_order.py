"""The global order: every row once an epoch, the same for every number of ranks, from any position on."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from hp_components.data.order import Position, RankSlice, RowOrder
from hp_components.data.packing import PADDING_ROW


def epoch_rows(order: RowOrder, dp: int, local: int, epochs: int = 1) -> list[list[int]]:
    """The global batches of some epochs, put together from the ranks."""
    ranks = [order.batches(Position(), RankSlice(local, rank, dp)) for rank in range(dp)]
    count = epochs * -(-order.rows // (dp * local))
    return [[row for rank in ranks for row in next(rank)] for _ in range(count)]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(("dp", "local"), [(1, 24), (2, 12), (3, 8), (8, 3), (24, 1)])
def test_ranks_together_take_what_one_process_takes(shuffle: bool, dp: int, local: int) -> None:
    order = RowOrder(rows=101, shuffle=shuffle, seed=7)
    assert epoch_rows(order, dp, local, 3) == epoch_rows(order, 1, 24, 3)


@pytest.mark.parametrize(("rows", "dp", "local"), [(101, 3, 4), (12, 3, 4), (5, 3, 4), (1, 1, 1)])
def test_an_epoch_has_every_row_once_and_padding_at_its_end_only(rows: int, dp: int, local: int) -> None:
    batches = epoch_rows(RowOrder(rows=rows, shuffle=True, seed=0), dp, local, 2)
    for epoch in (batches[: len(batches) // 2], batches[len(batches) // 2 :]):
        flat = list(itertools.chain(*epoch))
        assert sorted(flat[:rows]) == list(range(rows))
        assert flat[rows:] == [PADDING_ROW] * (-rows % (dp * local))


def test_epochs_differ_and_the_seed_decides() -> None:
    first, second = np.split(np.array(epoch_rows(RowOrder(rows=100, shuffle=True, seed=3), 1, 100, 2)), 2)
    assert first.tolist() != second.tolist()
    assert epoch_rows(RowOrder(rows=100, shuffle=True, seed=3), 1, 100) == first.tolist()
    assert epoch_rows(RowOrder(rows=100, shuffle=True, seed=4), 1, 100) != first.tolist()
    assert epoch_rows(RowOrder(rows=100, shuffle=False, seed=3), 1, 100) == [list(range(100))]


def test_the_order_of_a_seed_never_changes() -> None:
    # A resumed run relies on it, whatever numpy it has by then.
    assert epoch_rows(RowOrder(rows=10, shuffle=True, seed=42), 1, 10, 2) == EXPECTED


EXPECTED = [[4, 8, 1, 9, 3, 6, 0, 7, 2, 5], [1, 2, 8, 5, 3, 9, 6, 0, 4, 7]]


@pytest.mark.parametrize(("dp", "local"), [(1, 5), (2, 3), (8, 1)])
@pytest.mark.parametrize("done", [0, 1, 7, 19, 20, 21, 45])
def test_it_goes_on_from_any_position(dp: int, local: int, done: int) -> None:
    order, part = RowOrder(rows=101, shuffle=True, seed=1), RankSlice(local, dp - 1, dp)
    whole = list(itertools.islice(order.batches(Position(), part), done + 30))
    position = Position()
    for _ in range(done):
        position = order.after(position, part)
    assert list(itertools.islice(order.batches(position, part), 30)) == whole[done:]


def test_a_position_means_the_same_under_another_number_of_ranks() -> None:
    order = RowOrder(rows=1000, shuffle=True, seed=1)
    flat = list(itertools.chain(*epoch_rows(order, 1, 1000)))
    position = Position()
    for _ in range(5):
        position = order.after(position, RankSlice(3, 0, 8))
    assert position == Position(0, 120)
    taken = [next(order.batches(position, RankSlice(7, rank, 2))) for rank in range(2)]
    assert list(itertools.chain(*taken)) == flat[120:134]


def test_it_ends_after_the_epochs_asked_for() -> None:
    order = RowOrder(rows=10, shuffle=True, seed=1, epochs=2)
    assert len(list(order.batches(Position(), RankSlice(2, 1, 2)))) == 6
    assert order.is_over(Position(2, 0))
    assert not list(order.batches(Position(2, 0), RankSlice(2, 1, 2)))


def test_without_a_number_of_rows_they_come_one_after_the_other() -> None:
    order = RowOrder(rows=None, shuffle=False, seed=0)
    batches = order.batches(Position(0, 10), RankSlice(2, 1, 3))
    assert [next(batches), next(batches)] == [[12, 13], [18, 19]]


@pytest.mark.parametrize(("local", "rank", "world"), [(0, 0, 1), (1, 0, 0), (1, 2, 2), (1, -1, 2)])
def test_a_place_that_cannot_be_is_an_error(local: int, rank: int, world: int) -> None:
    with pytest.raises(ValueError, match="RankSlice"):
        RankSlice(local, rank, world)
