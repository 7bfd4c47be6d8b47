"""A deep model from a few of its layers: which ones to look at, and what the whole does.

In: the kinds of a model's layers in order; the intervals of a step of the shortened model. Out: the layers to keep;
the intervals of a step of the whole model. A layer's interval depends on its own kind and on its neighbours', whose
weights FSDP gathers ahead and whose gradients it still reduces; so a layer stands for all with the same three kinds.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from hp_trainer.plan.held import Held, Interval

__all__ = ["Shortening", "shorten"]

Context = tuple[Hashable, Hashable, Hashable]


@dataclass(frozen=True, slots=True)
class Shortening:
    """The layers to keep, and for each layer of the whole model the place of its likeness among these."""

    kept: tuple[int, ...]
    likeness: tuple[int, ...]

    def extend(
        self, intervals: Sequence[Interval], layer_states: Sequence[Held], *, foreach: bool = False
    ) -> list[Interval]:
        """The intervals of the whole model.

        Args:
            intervals: of the shortened model; one per kept layer in each phase that has layers, in order.
            layer_states: what each kept layer holds when the step begins.
            foreach: the update works on all parameters at once, so what it needs grows with them.
        """
        held = intervals[0].start if intervals else Held()
        for place in self.likeness:
            held = held + layer_states[place]
        for states in layer_states:
            held = held - states
        whole: list[Interval] = []
        for interval, layer in self._in_order(intervals):
            above = interval.peak - interval.start
            if foreach and interval.phase == "update":
                above = above.scaled(held.parameters / interval.start.parameters)
            peak, end = held + above, held + (interval.end - interval.start)
            whole.append(replace(interval, layer=layer, start=held, peak=peak, end=end))
            held = end
        return whole

    def _in_order(self, intervals: Sequence[Interval]) -> list[tuple[Interval, int | None]]:
        """The interval that stands for each interval of the whole model, and its layer's number there."""
        found: list[tuple[Interval, int | None]] = []
        index = 0
        while index < len(intervals):
            if intervals[index].layer is None:
                found.append((intervals[index], None))
                index += 1
                continue
            run = intervals[index : index + len(self.kept)]
            by_place = {interval.layer: interval for interval in run}
            if len(by_place) != len(self.kept) or len({interval.phase for interval in run}) != 1:
                raise RuntimeError(f"layers did not run one after the other: {[(i.phase, i.layer) for i in run]}")
            layers = range(len(self.likeness))
            backwards = run[0].layer != 0
            for layer in reversed(layers) if backwards else layers:
                found.append((by_place[self.likeness[layer]], layer))
            index += len(self.kept)
        return found


def shorten(kinds: Sequence[Hashable]) -> Shortening:
    """The fewest layers found that show every kind beside every pair of neighbours that it has in the whole."""
    contexts = _contexts(kinds)
    kept = list(range(len(kinds)))
    while cut := _cut([contexts[layer] for layer in kept]):
        del kept[slice(*cut)]
    place = {contexts[layer]: index for index, layer in reversed(list(enumerate(kept)))}
    likeness = [place[context] for context in contexts]
    for index, layer in enumerate(kept):
        likeness[layer] = index
    return Shortening(tuple(kept), tuple(likeness))


def _contexts(kinds: Sequence[Hashable]) -> list[Context]:
    padded = [None, *kinds, None]
    return [(padded[i], padded[i + 1], padded[i + 2]) for i in range(len(kinds))]


def _cut(contexts: Sequence[Context]) -> tuple[int, int] | None:
    """The longest stretch that can go: no other layer gets other neighbours, and all in it is also elsewhere."""
    for length in range(len(contexts) - 1, 0, -1):
        for start in range(len(contexts) - length):
            stop = start + length
            if contexts[start][:2] != contexts[stop][:2]:
                continue
            if set(contexts[start:stop]) <= {*contexts[:start], *contexts[stop:]}:
                return start, stop
    return None
