"""Which module made which node: forward nodes by the module that was running, backward nodes by their forward node.

In: a model while it is traced. Out: `hp_module` and `hp_backward` in every node's meta (G2).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from hp_compile import _torch_compat as compat


class ModuleRecord:
    """Which module was running when the graph had how many nodes."""

    def __init__(self, model: nn.Module) -> None:
        self._names = {id(module): name for name, module in model.named_modules()}
        self._stack: list[str] = []
        self._marks: list[tuple[int, str]] = []

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        def enter(module: nn.Module, _args: Any) -> None:
            self._stack.append(self._names.get(id(module), self._stack[-1] if self._stack else ""))
            self._marks.append((compat.nodes_so_far(), self._stack[-1]))

        def leave(_module: nn.Module, _args: Any, _output: Any) -> None:
            if self._stack:
                self._stack.pop()
            self._marks.append((compat.nodes_so_far(), self._stack[-1] if self._stack else ""))

        handles = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def names(self, count: int) -> list[str]:
        """The module of each of the first `count` nodes."""
        found, marks, current = [], iter([*self._marks, (count, "")]), ""
        at, following = next(marks)
        for index in range(count):
            while index >= at and at < count:
                current = following
                at, following = next(marks, (count, ""))
            found.append(current)
        return found


def mark_nodes(graph_module: GraphModule, boundary: int, modules: ModuleRecord, with_backward: bool) -> None:
    """Tag backward nodes, and give each the module of the forward node that it differentiates."""
    nodes = list(graph_module.graph.nodes)
    names = modules.names(len(nodes))
    forward_module: dict[int, str] = {}
    tagged = False
    for at, node in enumerate(nodes):
        number = node.meta.get("seq_nr")
        if at < boundary:
            node.meta["hp_module"] = names[at]
            if number is not None and node.op == "call_function":
                forward_module.setdefault(number, names[at])
            continue
        node.meta["hp_backward"] = True
        node.meta["hp_module"] = names[at] or forward_module.get(number, "")
        tagged = tagged or bool(node.meta.get("autograd_backward"))
    if with_backward and not tagged:
        raise RuntimeError(
            "no node of the captured graph is tagged as backward; torch.compiler._patch_engine_backward of this torch "
            f"({torch.__version__}) does not tag: install torch{compat.TORCH_NEEDED}"
        )
