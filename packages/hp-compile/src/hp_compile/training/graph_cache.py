"""Compiled steps by signature; the least recently used goes first (G7).

In: keys of inputs and model. Out: the one graph that was captured for exactly these, or None.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule

from hp_compile.tracer.joint_graph import JointGraph
from hp_compile.tracer.signature import FlatInputs
from hp_compile.training.bound_code import bound_forward


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
            self._steps.popitem(last=False)

    def newest(self, kind: str = "train") -> CompiledStep | None:
        return next((step for step in reversed(self._steps.values()) if step.kind == kind), None)

    def differs_only_in_floats(self, kind: str, flat: FlatInputs) -> bool:
        """Whether another graph has the same inputs but for the value of a float: each value is captured anew."""
        for step in self._steps.values():
            if step.kind != kind or step.flat.spec != flat.spec or step.flat.key == flat.key:
                continue
            pairs = zip(step.flat.key, flat.key, strict=True)
            if all(mine == theirs or (mine[0] is float and theirs[0] is float) for mine, theirs in pairs):
                return True
        return False

    def clear(self) -> None:
        self._steps.clear()
