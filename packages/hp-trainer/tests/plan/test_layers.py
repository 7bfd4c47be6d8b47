"""Which layers stand for the others, on lists of kinds whose answer can be seen."""

from __future__ import annotations

import pytest

from hp_trainer.plan.held import Held, Interval
from hp_trainer.plan.layers import shorten


def neighbours(kinds: str) -> list[str]:
    padded = f"^{kinds}$"
    return [padded[i : i + 3] for i in range(len(kinds))]


@pytest.mark.parametrize("kinds", ["A", "AB", "AAAAAAAA", "LLLF" * 16, "LF" * 9 + "L", "DDD" + "M" * 57, "ABCABCABD"])
def test_every_layer_has_a_likeness_with_the_same_neighbours(kinds: str) -> None:
    short = shorten(list(kinds))
    seen = neighbours("".join(kinds[layer] for layer in short.kept))
    assert [seen[place] for place in short.likeness] == neighbours(kinds)
    # No fewer can show them all, and no more than a few are needed.
    assert len(set(neighbours(kinds))) <= len(short.kept) <= len(set(neighbours(kinds))) + 1
    assert [short.likeness[layer] for layer in short.kept] == list(range(len(short.kept)))


def interval(phase: str, layer: int | None, start: int, peak: int, end: int) -> Interval:
    return Interval(phase, layer, *(Held(activations=value) for value in (start, peak, end)))


def test_a_step_of_the_whole_is_put_together_from_its_parts() -> None:
    # Five layers, three looked at: each keeps 10 in forward, with 3 more at its highest, and gives it back.
    short = shorten("AAAAA")
    assert len(short.kept) == 3
    forward = [interval("forward", i, 100 + 10 * i, 113 + 10 * i, 110 + 10 * i) for i in range(3)]
    loss = [interval("loss", None, 130, 190, 131)]
    backward = [interval("backward", i, 101 + 10 * (i + 1), 150, 101 + 10 * i) for i in (2, 1, 0)]
    # A layer holds 7 when the step begins, so the whole begins with 14 more.
    whole = short.extend([*forward, *loss, *backward], [Held(parameters=7)] * 3)
    assert [(i.phase, i.layer) for i in whole] == [
        *(("forward", layer) for layer in range(5)),
        ("loss", None),
        *(("backward", layer) for layer in (4, 3, 2, 1, 0)),
    ]
    assert [i.end.activations for i in whole[:5]] == [110, 120, 130, 140, 150]
    assert whole[5].peak == Held(parameters=14, activations=210)
    assert whole[-1].end.activations == 101


def test_layers_that_do_not_follow_each_other_are_not_guessed_at() -> None:
    short = shorten("AAA")
    mixed = [interval("forward", i, 0, 0, 0) for i in (0, 1, 1)]
    with pytest.raises(RuntimeError, match="layers did not run one after the other"):
        short.extend(mixed, [Held()] * 3)
