"""Compiled steps by signature; the least recently used goes first (G7).

In: keys of inputs and model. Out: the one graph that was captured for exactly these, or None.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule

from hp_compile.tracer.joint_graph import JointGraph
from hp_compile.tracer.signature import FlatInputs
from hp_compile.training.bound_code import bound_forward

log = logging.getLogger("hp_compile")
_REMEMBERED = 1000


@dataclass
class CompiledStep:
    """A graph that is ready to run.

    Attributes:
        kind: `"train"` or `"eval"`.
        model_key: training flags, requires_grad and the like at capture.
        schedule: the collectives in order; `schedule_hash` is compared between ranks.
    """

    kind: str
    flat: FlatInputs
    model_key: tuple[Any, ...]
    joint: JointGraph
    graph_module: GraphModule
    schedule: list[tuple[Any, ...]]
    schedule_hash: int

    def __post_init__(self) -> None:
        self.forward = bound_forward(self.graph_module)


class GraphCache:
    def __init__(self, max_graphs: int) -> None:
        if isinstance(max_graphs, bool) or not isinstance(max_graphs, int) or max_graphs < 1:
            raise ValueError(f"max_graphs={max_graphs!r} is not allowed; allowed: an integer of at least 1")
        self.max_graphs = max_graphs
        self._steps: OrderedDict[int, CompiledStep] = OrderedDict()
        self._number = 0
        self._warned: set[object] = set()
        # Of graphs that went; a number for each, so that a long run does not keep what it will not ask for again.
        self._gone: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._steps)

    def find(self, kind: str, flat: FlatInputs, model_key: tuple[Any, ...]) -> CompiledStep | None:
        for number in reversed(self._steps):
            step = self._steps[number]
            if step.kind == kind and flat.matches(step.flat.spec, step.flat.key) and step.model_key == model_key:
                self._steps.move_to_end(number)
                return step
        return None

    def add(self, step: CompiledStep) -> None:
        self._number += 1
        self._steps[self._number] = step
        while len(self._steps) > self.max_graphs:
            _, gone = self._steps.popitem(last=False)
            self._gone[_number_of(gone.kind, gone.flat, gone.model_key)] = None
            while len(self._gone) > _REMEMBERED:
                self._gone.popitem(last=False)

    def newest(self, kind: str = "train") -> CompiledStep | None:
        return next((step for step in reversed(self._steps.values()) if step.kind == kind), None)

    def warn_of_captures(self, kind: str, flat: FlatInputs, model_key: tuple[Any, ...]) -> None:
        """Each once, before a capture: what makes a run capture again and again is slow, and not an error."""
        for number in (float, int):
            if number not in self._warned and self.differs_only_in_numbers(kind, flat, number):
                self._warned.add(number)
                log.warning(
                    "%s in input or label changes from step to step and each value is captured anew; pass it as a 0-d "
                    "tensor",
                    "a float" if number is float else "an int",
                )
        if "gone" not in self._warned and _number_of(kind, flat, model_key) in self._gone:
            self._warned.add("gone")
            log.warning(
                "a graph that went because of max_graphs=%d is captured again; raise max_graphs, or pad the inputs to "
                "fewer shapes",
                self.max_graphs,
            )

    def differs_only_in_numbers(self, kind: str, flat: FlatInputs, number: type) -> bool:
        """Whether other graphs have the same inputs but for values of this type: each is captured anew.

        A few values of an int are modes; a float hardly ever comes again, so one is enough.
        """
        alike = 0
        for step in self._steps.values():
            if step.kind != kind or step.flat.spec != flat.spec or step.flat.key == flat.key:
                continue
            pairs = zip(step.flat.key, flat.key, strict=True)
            alike += all(mine == theirs or (mine[0] is number and theirs[0] is number) for mine, theirs in pairs)
        return alike >= (1 if number is float else min(3, self.max_graphs))


def _number_of(kind: str, flat: FlatInputs, model_key: tuple[Any, ...]) -> int:
    return hash((kind, repr(flat.spec), flat.key, model_key))
