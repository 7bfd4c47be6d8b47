"""What every pass must leave behind, looked at after each one, so that the pass at fault is the one that is named.

In: the graph before the first pass, and after each. Out: nothing, or an error with the pass, the node and the remedy.
Free of torch at import.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node


class PassCheck:
    """Placeholders and outputs in number, nodes in order, a value in the meta of every node that a pass has made."""

    def __init__(self, graph_module: GraphModule) -> None:
        self._inputs, self._outputs = _ends(graph_module)
        self._known = set(graph_module.graph.nodes)

    def after(self, name: str, graph_module: Any) -> GraphModule:
        """The pass's result, if it is sound.

        Raises:
            RuntimeError: it is no graph module, does not lint, lost or gained a placeholder or an output, or has a new
                node without `meta["val"]`.
        """
        if not hasattr(graph_module, "graph"):
            raise RuntimeError(f"pass {name!r} returned {type(graph_module).__name__}; it must return a GraphModule")
        try:
            graph_module.graph.lint()
        except RuntimeError as error:
            raise RuntimeError(f"pass {name!r} left a graph that does not lint: {error}") from error
        inputs, outputs = _ends(graph_module)
        if (inputs, outputs) != (self._inputs, self._outputs):
            raise RuntimeError(
                f"pass {name!r} left a graph with {inputs} placeholders and {outputs} outputs, not {self._inputs} and "
                f"{self._outputs}; the trainer finds parameters and gradients by position: keep number and order"
            )
        nodes = set(graph_module.graph.nodes)
        for node in graph_module.graph.nodes:
            if node not in self._known and node.op == "call_function" and "val" not in node.meta:
                raise RuntimeError(
                    f"pass {name!r} made node {node.name!r} ({node.target}) without meta['val'], from which later "
                    "passes read shape and dtype; make it with hp_compile.insert_call(graph, target, *args), or set "
                    "node.meta['val'] to a fake tensor of what it computes"
                )
        self._known = nodes
        return graph_module


def _ends(graph_module: GraphModule) -> tuple[int, int]:
    nodes: list[Node] = list(graph_module.graph.nodes)
    results = nodes[-1].args[0]
    return sum(node.op == "placeholder" for node in nodes), len(results) if isinstance(results, (list, tuple)) else 1
